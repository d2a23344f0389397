import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { address } from "../../api/request";
import { useRemote } from "../../api/remote";
import type { Frame, StackLine, StackTableAnswer } from "../../api/stacks";
import { route } from "../../state/app";
import { exactBytes, inUnit, percent, type Unit, unitFor, unitWithin, withUnit } from "../../state/bytes";
import { frameName } from "../../state/frames";
import { grouped } from "../../state/numbers";
import { titleText } from "../../state/names";
import { choice, sameRun } from "./choice";
import { FrameList } from "./frame_list";
import { Bar, Head, Line, PAGE, Pages, Tools } from "./ranked";
import type { Query } from "./tables";
import { walkRows } from "../row_keys";

interface Props {
  query: Query;
  search: string;
  picker: ComponentChildren;
}

/** Call stacks, each by the line of it that people know; a click shows all of its frames. */
export function StackTable({ query, search, picker }: Props) {
  const [first, setFirst] = useState(0);
  const sort = route.value.ranked ?? "bytes";
  useEffect(() => setFirst(0), [search, sort]);
  const path = address("stack_table", { ...query, find: search || undefined, sort, first, count: PAGE });
  const answer = useRemote<StackTableAnswer>(path, search ? 80 : 0, sameRun);
  const data = answer.data;
  if (answer.failure) return <p class="nothing">{titleText(answer.failure.what)}</p>;
  if (!data) return <p class="loading">Reading the stacks …</p>;
  const unit = unitFor(data.bytes);
  const widest = data.rows.reduce((top, row) => Math.max(top, row.bytes), 0);
  const each = unitWithin(unit, data.rows.reduce((top, row) => Math.max(top, row.per_call), 0));
  return (
    <div class={answer.stale ? "stale" : undefined} aria-busy={answer.stale}>
      <Tools picker={picker}>
        <Pages first={data.first} count={data.rows.length} all={data.rows_found} onGo={setFirst} />
        <span class="hint" data-testid="stacks-sum" title={exactBytes((data.found ?? data).bytes)}>
          {unit.name} · {grouped(data.rows_found)} {data.rows_found === 1 ? "stack" : "stacks"}
          {data.found ? " found" : ""} sum to {withUnit((data.found ?? data).bytes, unit)}
        </span>
      </Tools>
      <div class="sideways">
        <table class="plain ranked">
          <thead>
            <tr>
              <Head id="line" label="stack" title="The innermost line of your code in the stack" number={false} />
              <th scope="col">
                <span class="unseen">share</span>
              </th>
              <Head id="bytes" label={choice().of === "step" ? "allocated" : "alive"} title="Bytes" />
              <th scope="col" class="number">
                %
              </th>
              <Head id="count" label="allocations" title="How many allocations" />
              <Head id="per_call" label={each === unit ? "each" : `each, ${each.name}`} title="Bytes of an allocation, on average" />
            </tr>
          </thead>
          <tbody onKeyDown={walkRows}>
            {data.rows.map((row, i) => (
              <Row key={`${data.first + i} ${row.line}`} row={row} data={data} unit={unit} each={each} widest={widest} />
            ))}
          </tbody>
        </table>
      </div>
      {data.rows.length === 0 && (
        <p class="nothing" data-testid="no-match">
          {search ? "No frame of any stack contains this text." : "Nothing was allocated."}
        </p>
      )}
    </div>
  );
}

interface RowProps {
  row: StackLine;
  data: StackTableAnswer;
  unit: Unit;
  each: Unit;
  widest: number;
}

function Row({ row, data, unit, each, widest }: RowProps) {
  const [open, setOpen] = useState(false);
  return (
    <>
      <tr data-testid="stack-row" data-key={row.line} data-bytes={row.bytes}>
        <th scope="row">
          <button type="button" class="fold" aria-expanded={open} onClick={() => setOpen(!open)}>
            <span class="caret" aria-hidden="true">
              {open ? "▾" : "▸"}
            </span>
            <Line line={row.line} kind={row.kind} by={callers(row, data.frames)} />
          </button>
        </th>
        <td>
          <Bar share={widest > 0 ? row.bytes / widest : 0} kind={row.kind} />
        </td>
        <td class="number strong" title={exactBytes(row.bytes)}>
          {inUnit(row.bytes, unit)}
        </td>
        <td class="number muted">{percent(row.bytes, data.bytes)}</td>
        <td class="number muted">{grouped(row.count)}</td>
        <td class="number muted" title={`${grouped(row.per_call)} bytes on average`}>
          {inUnit(row.per_call, each)}
        </td>
      </tr>
      {open && (
        <tr class="opened" data-testid="stack-frames">
          <td colSpan={6}>
            <Frames title="Call stack, innermost first" frames={data.frames} rows={row.stack} />
            {row.forward.length > 0 && (
              <Frames title="The forward that this backward belongs to" frames={data.frames} rows={row.forward} />
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
