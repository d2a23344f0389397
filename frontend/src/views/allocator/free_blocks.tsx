import type { AllocatorState } from "../../api/types";
import { exactBytes, unitFor, withUnit } from "../../state/bytes";
import { counted, grouped } from "../../state/numbers";
import { Heads } from "../heads";

/** Free blocks by size: many small ones serve no large request. */
export function FreeBlocks({ state }: { state: AllocatorState }) {
  const most = Math.max(1, ...state.free.map((row) => row.bytes));
  const count = state.free.reduce((sum, row) => sum + row.count, 0);
  const total = state.free_bytes ?? 0;
  const unit = unitFor(most);
  return (
    <section class="card" data-testid="free-blocks" aria-label="Free blocks by size">
      <h2 title={exactBytes(total)}>
        {count === 0
          ? "Nothing is free in the reserve"
          : `${counted(count, "free block")}, ${withUnit(total)}`}
      </h2>
      {count > 0 && (
        <table class="plain free-blocks">
          <Heads columns={["size of the block", { number: "blocks" }, { number: unit.name }, { unseen: "as a bar" }]} />
          <tbody>
            {state.free.map((row) => (
              <tr key={row.from_bytes} data-testid="free-row" data-key={row.from_bytes}>
                <th scope="row">{range(row.from_bytes)}</th>
                <td class="number">{grouped(row.count)}</td>
                <td class="number" title={exactBytes(row.bytes)}>
                  {withUnit(row.bytes, unit).replace(` ${unit.name}`, "")}
                </td>
                <td>
                  <span class="bar">
                    <span class="free-bar" style={{ width: `${(100 * row.bytes) / most}%` }} />
                  </span>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </section>
  );
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** "2 – 4 MiB": powers of two are whole in their unit. */
function range(from: number): string {
  const power = Math.min(UNITS.length - 1, Math.floor(Math.log2(from) / 10));
  const low = from / 1024 ** power;
  return `${low} – ${2 * low} ${UNITS[power]}`;
}
