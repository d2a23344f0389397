import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { address } from "../../api/request";
import { useRemote } from "../../api/remote";
import type { LineTableAnswer } from "../../api/stacks";
import { navigate, route } from "../../state/app";
import { exactBytes, inUnit, percent, unitFor, unitWithin, withUnit } from "../../state/bytes";
import { lastPart } from "../../state/frames";
import { titleText } from "../../state/names";
import { grouped } from "../../state/numbers";
import { choice, sameRun } from "./choice";
import { Bar, Head, Line, PAGE, Pages, Tools } from "./ranked";
import type { Query } from "./tables";
import { walkRows } from "../row_keys";

interface Props {
  query: Query;
  search: string;
  picker: ComponentChildren;
}

/** Source lines: each stack counts for its innermost line of the user's code. */
export function LineTable({ query, search, picker }: Props) {
  const [first, setFirst] = useState(0);
  const sort = route.value.ranked ?? "bytes";
  useEffect(() => setFirst(0), [search, sort]);
  const path = address("line_table", { ...query, find: search || undefined, sort, first, count: PAGE });
  const answer = useRemote<LineTableAnswer>(path, search ? 80 : 0, sameRun);
  const data = answer.data;
  if (answer.failure) return <p class="nothing">{titleText(answer.failure.what)}</p>;
  if (!data) return <p class="loading">Reading the lines …</p>;
  const unit = unitFor(data.bytes);
  const widest = data.rows.reduce((top, row) => Math.max(top, row.bytes), 0);
  const median = unitWithin(unit, data.rows.reduce((top, row) => Math.max(top, row.median), 0));
  return (
    <div class={answer.stale ? "stale" : undefined} aria-busy={answer.stale}>
      <Tools picker={picker}>
        <Pages first={data.first} count={data.rows.length} all={data.rows_found} onGo={setFirst} />
        <span class="hint" data-testid="lines-sum" title={exactBytes((data.found ?? data).bytes)}>
          {unit.name} · {grouped(data.rows_found)} {data.rows_found === 1 ? "line" : "lines"}
          {data.found ? " found" : ""} sum to {withUnit((data.found ?? data).bytes, unit)}
        </span>
      </Tools>
      <div class="sideways">
        <table class="plain ranked">
          <thead>
            <tr>
              <Head id="line" label="source line" title="File, line and function" number={false} />
              <th scope="col">
                <span class="unseen">share</span>
              </th>
              <Head id="bytes" label={choice().of === "step" ? "allocated" : "alive"} title="Bytes" />
              <th scope="col" class="number">
                %
              </th>
              <Head id="count" label="allocations" title="How many allocations" />
              <Head id="per_call" label={median === unit ? "median" : `median, ${median.name}`} title="Size of the median allocation" />
            </tr>
          </thead>
          <tbody onKeyDown={walkRows}>
            {data.rows.map((row) => {
              return (
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
                  <td>
                    <Bar share={widest > 0 ? row.bytes / widest : 0} kind={row.kind} />
                  </td>
                  <td class="number strong" title={exactBytes(row.bytes)}>
                    {inUnit(row.bytes, unit)}
                  </td>
                  <td class="number muted">{percent(row.bytes, data.bytes)}</td>
                  <td class="number muted">{grouped(row.count)}</td>
                  <td class="number muted" title={exactBytes(row.median)}>
                    {inUnit(row.median, median)}
                  </td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
      {data.rows.length === 0 && (
        <p class="nothing" data-testid="no-match">
          {search ? "No source line contains this text." : "Nothing was allocated."}
        </p>
      )}
    </div>
  );
}

/** `/a/model.py:20 (forward)` is found by `model.py:20`, in frames and in lines. */
function searchFor(line: string): string {
  const place = /^(.*?:-?\d+) \(/s.exec(line)?.[1] ?? line;
  return lastPart(place).slice(0, 400);
}
