import { useState } from "preact/hooks";
import { navigate, route } from "../../state/app";
import type { CauseGroup } from "../../state/fleet";
import { counted, grouped } from "../../state/numbers";
import { shortLine } from "../allocator/state_panel";
import { Name } from "../name";
import { ShareBar } from "../table";

const MOST = 5;

/** The runs that ran out of memory at one line, or grow: how many each, and by a click only these. */
export function Causes({ groups, of }: { groups: CauseGroup[]; of: number }) {
  const [whole, setWhole] = useState(false);
  const { cause } = route.value;
  if (groups.every((group) => group.count === 1)) return null;
  const shown = whole ? groups : groups.slice(0, MOST);
  const most = groups[0]!.count;
  return (
    <section class="card causes" data-testid="causes">
      <h2>The same cause</h2>
      <table class="plain">
        <tbody>
          {shown.map((group) => (
            <tr key={group.key} class={cause === group.key ? "picked" : undefined}>
              <td class="number strong">
                {grouped(group.count)} of {grouped(of)}
              </td>
              <td class="bar-cell">
                <ShareBar share={group.count / most} />
              </td>
              <th scope="row">
                <button
                  type="button"
                  class="fold"
                  aria-pressed={cause === group.key}
                  title="List only these"
                  data-testid="cause"
                  onClick={() => navigate({ cause: cause === group.key ? undefined : group.key })}
                >
                  <CauseText cause={group.cause} line={group.line} />
                </button>
              </th>
            </tr>
          ))}
        </tbody>
      </table>
      {groups.length > MOST && (
        <button type="button" class="quiet" aria-expanded={whole} onClick={() => setWhole(!whole)}>
          {whole ? "Fewer" : `${counted(groups.length - MOST, "more cause")}`}
        </button>
      )}
    </section>
  );
}

export function CauseText({ cause, line }: Pick<CauseGroup, "cause" | "line">) {
  if (cause === "growth") return <>grows step after step</>;
  return (
    <>
      out of memory{line === null ? ", line not recorded" : " at "}
      {line !== null && <Name text={shortLine(line)} title={line} />}
    </>
  );
}
