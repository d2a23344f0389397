import type { AllocatorState, PoolState } from "../../api/types";
import { exactBytes, inUnit, unitFor, withUnit } from "../../state/bytes";
import { counted, grouped } from "../../state/numbers";
import { Name } from "../name";
import { Heads } from "../table";

const COLUMNS: readonly [keyof PoolState & string, string, string][] = [
  ["allocated_bytes", "allocated", "Requested, and in use"],
  ["pending_bytes", "pending", "Free requested, not completed"],
  ["rounded_bytes", "rounded", "Set aside for allocated and pending blocks"],
  ["free_bytes", "free", "Reserved, but in no block"],
  ["largest_free_bytes", "largest free", "The largest free range"],
  ["reserved_bytes", "reserved", "What the pool took from the device"],
];

/** Every pool by stream, and their sum. */
export function Pools({ state }: { state: AllocatorState }) {
  const unit = unitFor(state.reserved_bytes ?? state.active_bytes);
  const { pools } = state;
  return (
    <section class="card" data-testid="pools" aria-label="Pools">
      <h2>Pools, {unit.name}</h2>
      <div class="sideways" tabIndex={0} role="region" aria-label="Pools, scrolls sideways">
        <table class="plain pools">
          <thead>
            <tr>
              <th>pool</th>
              <th>stream</th>
              {COLUMNS.map(([key, label, title]) => (
                <th key={key} class="number" title={title}>
                  {label}
                </th>
              ))}
              <th class="number">segments</th>
            </tr>
          </thead>
          <tbody>
            {pools.map((pool) => (
              <tr key={`${pool.pool} ${pool.stream}`} data-testid="pool-row" data-key={`${pool.pool} · ${pool.stream}`}>
                <th scope="row">
                  <Name text={pool.pool} />
                </th>
                <td>
                  <Name text={pool.stream} />
                </td>
                {COLUMNS.map(([key]) => (
                  <Cell key={key} pool={pool} column={key} unit={unit} />
                ))}
                <td class="number">{pool.segments === null ? "–" : grouped(pool.segments)}</td>
              </tr>
            ))}
          </tbody>
          {pools.length > 1 && (
            <tfoot>
              <tr data-testid="pool-sum">
                <th scope="row">all</th>
                <td />
                {COLUMNS.map(([key]) => (
                  <Cell key={key} pool={summed(pools)} column={key} unit={unit} />
                ))}
                <td class="number">{grouped(pools.reduce((sum, pool) => sum + (pool.segments ?? 0), 0))}</td>
              </tr>
            </tfoot>
          )}
        </table>
      </div>
      <RuleNote pools={pools} />
      {state.outside.count > 0 && (
        <p class="foot">
          {grouped(state.outside.count)} blocks ({inUnit(state.outside.bytes, unit)} {unit.name}) are in no recorded
          segment: they count as rounded, but not as reserved.
        </p>
      )}
    </section>
  );
}

function Cell({ pool, column, unit }: { pool: PoolState; column: keyof PoolState; unit: { name: string; size: number } }) {
  const bytes = pool[column];
  if (typeof bytes !== "number") return <td class="number muted">–</td>;
  const rule = column === "rounded_bytes" && pool.by_rule_bytes > 0;
  const title = rule
    ? `${exactBytes(bytes)}, ${exactBytes(pool.by_rule_bytes)} of it by the rule`
    : exactBytes(bytes);
  return (
    <td class={bytes === 0 ? "number zero" : "number"} title={title} data-column={column}>
      {inUnit(bytes, unit)}
      {rule && <sup>*</sup>}
    </td>
  );
}

/** The sum of all pools; the largest free block is the largest of any. */
function summed(pools: PoolState[]): PoolState {
  const sum = (key: keyof PoolState): number =>
    pools.reduce((total, pool) => total + ((pool[key] as number | null) ?? 0), 0);
  return {
    pool: "all",
    stream: "",
    allocated_bytes: sum("allocated_bytes"),
    pending_bytes: sum("pending_bytes"),
    rounded_bytes: sum("rounded_bytes"),
    by_rule_bytes: sum("by_rule_bytes"),
    reserved_bytes: pools.some((pool) => pool.reserved_bytes === null) ? null : sum("reserved_bytes"),
    segments: sum("segments"),
    free_bytes: pools.some((pool) => pool.free_bytes === null) ? null : sum("free_bytes"),
    largest_free_bytes: Math.max(0, ...pools.map((pool) => pool.largest_free_bytes ?? 0)),
  };
}

function RuleNote({ pools }: { pools: PoolState[] }) {
  if (!pools.some((pool) => pool.by_rule_bytes > 0)) return null;
  return (
    <p class="foot">
      <sup>*</sup> The file has rounded sizes only for blocks alive at its end. The others follow the allocator's rule:
      multiples of 512 bytes, plus a remainder too small to be a block.
    </p>
  );
}

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
