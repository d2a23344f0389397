import type { Remote } from "../../api/remote";
import type { AllocationAnswer } from "../../api/types";
import { navigate, selection } from "../../state/app";
import { exactBytes } from "../../state/bytes";
import { moduleLabel, NOT_NAMED, titleText } from "../../state/names";
import { grouped } from "../../state/numbers";
import { asPartOfPeak } from "../../state/part_of_peak";
import { duration, exactTime } from "../../state/time";
import { Category } from "../category";
import { Name } from "../name";
import { RouteLink } from "../route_link";
import { FrameList } from "../stacks/frame_list";

interface Props {
  one: Remote<AllocationAnswer>;
  row: number | null;
  shown: Shown;
  origin: number;
}

/** Why this one: someone points at it, keeps it, or nothing is picked and it is the largest at the peak. */
export type Shown = "pointed at" | "kept" | "largest";

/** Everything about the allocation that is pointed at, else about the one that was kept, else about the largest. */
export function AllocationPanel({ one, row, shown, origin }: Props) {
  if (row === null || (!one.data && !one.failure))
    return (
      <aside class="card side allocation-panel" data-testid="allocation-panel" data-row="" aria-busy={row !== null}>
        <h2>One allocation</h2>
        <p class="muted">
          Point at a band, or click a row of the table, to see its size, its lifetime and the code that allocated it.
        </p>
      </aside>
    );
  if (!one.data)
    return (
      <aside class="card side allocation-panel" data-testid="allocation-panel" data-row="">
        <p class="muted">{titleText(one.failure!.what)}</p>
      </aside>
    );
  return <Details one={one.data} stale={one.stale} shown={shown} origin={origin} />;
}

function Details({ one, stale, shown, origin }: { one: AllocationAnswer; stale: boolean; shown: Shown; origin: number }) {
  const lived = one.last_ns - one.first_ns;
  return (
    <aside
      class={stale ? "card side allocation-panel stale" : "card side allocation-panel"}
      data-testid="allocation-panel"
      data-row={shown === "largest" ? "" : one.row}
      data-largest={shown === "largest" ? one.row : undefined}
      data-exact={stale ? "false" : "true"}
    >
      <h2 class="flexed">
        <Category of={one.category} />
        {shown === "largest" && <span class="approx let-go">the largest at the peak</span>}
        {shown === "kept" && (
          <button type="button" class="quiet let-go" data-testid="let-go" onClick={() => navigate({ block: undefined })}>
            let go
          </button>
        )}
      </h2>
      <div class="big amount" title={exactBytes(one.bytes)} data-testid="allocation-bytes">
        {asPartOfPeak(one.bytes)}
      </div>
      <p class="where">
        {exactBytes(one.bytes)}
        {one.rounded_bytes === one.bytes && " requested and taken"}
        {one.rounded_bytes !== null && one.rounded_bytes !== one.bytes && ` requested, takes ${grouped(one.rounded_bytes)}`}
      </p>
      <p class="where" data-testid="allocation-why">
        {titleText(one.why)}
      </p>
      <dl class="facts" data-testid="allocation-facts">
        {one.name !== null && <Fact name="name" value={one.name} />}
        {one.tensor !== null && <Fact name="tensor" value={one.tensor} />}
        {one.module !== null && one.module !== NOT_NAMED && <Fact name="module" value={moduleLabel(one.module)} />}
        {one.operator !== null && <Fact name="operator" value={one.operator} />}
        <dt>phase</dt>
        <dd>{one.phase === "before" ? "before the window" : one.phase}</dd>
        <dt>address</dt>
        <dd class="mono" data-testid="allocation-address">
          {/^0x0*$/.test(one.address) ? "not known" : `${one.address}_${one.version}`}
        </dd>
        <dt>allocated</dt>
        <dd>
          <When event={one.born_event} time={one.born_ns} none="before the window" origin={origin} />
        </dd>
        <dt>freed</dt>
        <dd>
          <When event={one.freed_event} time={one.freed_ns} none="not in the window" origin={origin} />
        </dd>
        <dt>lived</dt>
        <dd title={exactTime(lived)}>
          {one.lifetime_ns === null ? `${duration(lived)} of the window` : duration(one.lifetime_ns)}
        </dd>
        {!one.pool.startsWith("(") && (
          <>
            <dt>pool</dt>
            <dd>
              {titleText(one.pool)}, {titleText(one.stream)}
            </dd>
          </>
        )}
        {one.annotation !== null && <Fact name="annotation" value={one.annotation} />}
        {one.context !== null && <Fact name="compiled graph" value={one.context} />}
      </dl>
      <div class="buttons">
        {one.born_ns !== null && (
          <RouteLink to={{ view: "timeline", t: String(one.born_ns) }} class="small">
            in the Timeline
          </RouteLink>
        )}
        {selection.value?.stats?.peak_reserved_bytes != null && (
          <RouteLink to={{ view: "allocator", block: String(one.row), ...bornAt(one) }} class="small">
            in its segment
          </RouteLink>
        )}
      </div>
      <FrameList title="Call stack" frames={one.stack.map((row) => one.frames[row]!)} />
      {one.forward.length > 0 && (
        <FrameList title="Its forward" frames={one.forward.map((row) => one.frames[row]!)} />
      )}
    </aside>
  );
}

function bornAt(one: AllocationAnswer): { t?: string; event?: string } {
  return one.born_ns === null || one.born_event === null
    ? {}
    : { t: String(one.born_ns), event: String(one.born_event) };
}

function Fact({ name, value }: { name: string; value: string }) {
  return (
    <>
      <dt>{name}</dt>
      <dd>
        <Name text={value} />
      </dd>
    </>
  );
}

interface WhenProps {
  event: number | null;
  time: number | null;
  none: string;
  origin: number;
}

function When({ event, time, none, origin }: WhenProps) {
  if (event === null || time === null) return <span class="muted">{none}</span>;
  return (
    <span title={exactTime(time - origin)}>
      {duration(time - origin)}, event {grouped(event)}
    </span>
  );
}
