import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { Query } from "../../api/request";
import type { Frame, StackLine, StackTableAnswer } from "../../api/types";
import { frameName, toldApart } from "../../state/frames";
import { Fold } from "../fold";
import { Tensor } from "../tensor";
import { FrameList } from "./frame_list";
import { Line, Ranked, RankedCells, type Scale } from "./ranked";

interface Props {
  query: Query;
  search: string;
  picker: ComponentChildren;
}

/** Call stacks by their innermost line of the user's code; a click shows all frames. */
export function StackTable({ query, search, picker }: Props) {
  return (
    <Ranked<StackLine, StackTableAnswer>
      what="stack"
      query={query}
      search={search}
      picker={picker}
      name={["stack", "The innermost line of your code in the stack"]}
      size={["each", "Bytes of an allocation, on average", (row) => row.per_call]}
      noMatch="No frame of any stack contains this text."
      rows={({ rows, frames, first }, scale) => {
        const own = toldApart(rows.map((row) => ({ key: keyOf(row, frames), label: row.line })));
        return (row, i) => (
          <Row key={`${first + i} ${row.line}`} row={row} scale={scale} frames={frames} own={own.get(keyOf(row, frames))} />
        );
      }}
    />
  );
}

function keyOf({ stack }: StackLine, frames: Frame[]): string {
  return stack.map((place) => frameName(frames[place]!)).join("\n");
}

interface RowProps {
  row: StackLine;
  scale: Scale;
  frames: Frame[];
  /** What tells it apart from others that go by the same line. */
  own: string | undefined;
}

function Row({ row, scale, frames, own }: RowProps) {
  const [open, setOpen] = useState(false);
  return (
    <>
      <tr data-testid="stack-row" data-key={row.line} data-bytes={row.bytes}>
        <th scope="row">
          <Fold open={open} onFlip={() => setOpen(!open)}>
            <Line line={row.line} kind={row.kind} by={[own && `→ ${own}`, callers(row, frames)].filter(Boolean).join(" ")} />
            <Tensor text={row.tensor} />
          </Fold>
        </th>
        <RankedCells row={row} size={row.per_call} scale={scale} />
      </tr>
      {open && (
        <tr class="opened" data-testid="stack-frames">
          <td colSpan={6}>
            <Frames title="Call stack, innermost first" frames={frames} rows={row.stack} />
            {row.forward.length > 0 && (
              <Frames title="The forward that this backward belongs to" frames={frames} rows={row.forward} />
            )}
          </td>
        </tr>
      )}
    </>
  );
}

/** The user's functions around the line, innermost first: they tell stacks of one line apart. */
function callers(row: StackLine, frames: Frame[]): string {
  const users = row.stack.map((place) => frames[place]!).filter((frame) => frame.kind === "user");
  return users
    .slice(1, 7)
    .map((frame) => `← ${frameName(frame)}`)
    .join(" ");
}

function Frames({ title, frames, rows }: { title: string; frames: Frame[]; rows: number[] }) {
  return <FrameList title={title} frames={rows.map((row) => frames[row]!)} />;
}
