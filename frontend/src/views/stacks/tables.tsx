import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { useRemote } from "../../api/remote";
import { address, type Query } from "../../api/request";
import type { Frame, RuleTableAnswer, SourceLine, StackLine, StackTableAnswer } from "../../api/types";
import { colorVariable } from "../../draw/palette";
import { navigate, route } from "../../state/app";
import { percent, unitFor } from "../../state/bytes";
import { frameName, searchFor, toldApart } from "../../state/frames";
import { titleText } from "../../state/names";
import { grouped } from "../../state/numbers";
import { BytesCell } from "../amount";
import { Swatch } from "../category";
import { Fold } from "../fold";
import { Name } from "../name";
import { Segmented } from "../segmented";
import { ShareBar, ShareHead } from "../table";
import { Tensor } from "../tensor";
import { SAME_RUN } from "./choice";
import { FrameList } from "./frame_list";
import { Line, Ranked, RankedCells, type Scale, Tools } from "./ranked";

const TABLES = [
  ["stacks", "Stacks"],
  ["lines", "Source lines"],
  ["rules", "By rule"],
] as const;

/** The same bytes as rows: by stack, by source line, by rules that people write themselves. */
export function Tables({ query, search }: { query: Query; search: string }) {
  const table = TABLES.find(([key]) => key === route.value.table)?.[0] ?? "stacks";
  const picker = (
    <Segmented
      label="Rows"
      testid="table"
      options={TABLES}
      value={table}
      onPick={(to) => navigate({ table: to === "stacks" ? undefined : to, ranked: undefined })}
    />
  );
  return (
    <section class="card stack-tables">
      {table === "stacks" && <StackTable query={query} search={search} picker={picker} />}
      {table === "lines" && <LineTable query={query} search={search} picker={picker} />}
      {table === "rules" && <RuleTable query={query} picker={picker} />}
    </section>
  );
}

interface Props {
  query: Query;
  search: string;
  picker: ComponentChildren;
}

/** Source lines: each stack counts for its innermost line of the user's code. */
function LineTable({ query, search, picker }: Props) {
  return (
    <Ranked<SourceLine>
      what="line"
      query={query}
      search={search}
      picker={picker}
      name={["source line", "File, line and function"]}
      size={["median", "Size of the median allocation", (row) => row.median]}
      noMatch="No source line contains this text."
      rows={(_, scale) => (row) => (
        <tr key={row.line} data-testid="line-row" data-key={row.line} data-bytes={row.bytes}>
          <th scope="row">
            <button
              type="button"
              class="fold"
              title="Search for this file in the stacks"
              onClick={() => row.kind !== "none" && navigate({ search: searchFor(row.line) })}
            >
              <Line line={row.line} kind={row.kind} />
            </button>
          </th>
          <RankedCells row={row} size={row.median} scale={scale} />
        </tr>
      )}
    />
  );
}

/** Call stacks by their innermost line of the user's code; a click shows all frames. */
function StackTable({ query, search, picker }: Props) {
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

const EXAMPLE = "attention=attn|sdpa\nmlp=mlp|feed_forward\nloss=cross_entropy|loss\noptimizer=optim/";

/** Names that people give to stacks by patterns; what they type stays in the address. */
function RuleTable({ query, picker }: { query: Query; picker: ComponentChildren }) {
  const { rules = "" } = route.value;
  const answer = useRemote<RuleTableAnswer>(address("rule_table", { ...query, rules }), 250, SAME_RUN);
  const { data, failure } = answer;
  const unit = unitFor(data?.bytes ?? 0);
  const rows = data?.rows ?? [];
  const widest = rows.reduce((top, row) => Math.max(top, row.bytes), 0);
  return (
    <>
      <Tools picker={picker}>
        <span class="hint">one rule a line: name=regular expression · the first that matches a frame's function or file counts</span>
      </Tools>
      <div class="rules">
        <div>
          <textarea
            class="mono"
            aria-label="Rules, one a line: name=regex"
            aria-invalid={failure !== undefined}
            aria-describedby={failure ? "rules-failure" : undefined}
            data-testid="rules"
            spellcheck={false}
            maxLength={4000}
            rows={8}
            placeholder={EXAMPLE}
            value={rules}
            onInput={(e) => navigate({ rules: e.currentTarget.value || undefined })}
          />
          {rules === "" && (
            <button type="button" class="small" data-testid="rules-example" onClick={() => navigate({ rules: EXAMPLE })}>
              try these
            </button>
          )}
          {failure && (
            <p class="rules-failure" id="rules-failure" role="alert" data-testid="rules-failure">
              {titleText(failure.what)} <span class="muted">{titleText(failure.fix)}</span>
            </p>
          )}
        </div>
        <table class={answer.stale ? "plain stale" : "plain"} aria-busy={answer.stale}>
          <ShareHead name="rule" unit={unit} />
          <tbody>
            {rows.map((row, i) => (
              <tr key={row.key} data-testid="rule-row" data-key={row.key}>
                <th scope="row">
                  <span class="flexed">
                    <Swatch by="rule" of={row.key} index={i} />
                    <Name text={row.key} />
                  </span>
                </th>
                <td>
                  <ShareBar
                    share={row.bytes / widest}
                    background={i === rows.length - 1 ? "var(--hatch)" : `var(${colorVariable("rule", row.key, i)})`}
                  />
                </td>
                <BytesCell bytes={row.bytes} unit={unit} tone="strong" />
                <td class="number muted">{percent(row.bytes, data!.bytes)}</td>
                <td class="number muted">{grouped(row.count)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}
