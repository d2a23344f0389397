import type { Remote } from "../../api/remote";
import type { AllocationAnswer } from "../../api/types";
import { asPartOfPeak, navigate, selection } from "../../state/app";
import { exactBytes } from "../../state/bytes";
import { moduleLabel, NOT_NAMED, titleText } from "../../state/names";
import { grouped } from "../../state/numbers";
import { duration, exactTime } from "../../state/time";
import { Category } from "../category";
import { Name } from "../name";
import { RouteLink } from "../route_link";
import { FrameList } from "../stacks/frame_list";
import { Fact } from "../fact";
import { ShapesAreRecorded } from "../tensor";

interface Props {
  one: Remote<AllocationAnswer>;
  row: number | null;
  shown: Shown;
  origin: number;
  lacksShapes: boolean;
}

/** Why this one: someone points at it, keeps it, or nothing is picked and it is the largest at the peak. */
export type Shown = "pointed at" | "kept" | "largest";

/** Everything about the allocation that is pointed at, else about the one that was kept, else about the largest. */
export function AllocationPanel({ one, row, ...rest }: Props) {
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
  return <Details one={one.data} stale={one.stale} {...rest} />;
}

interface DetailsProps extends Omit<Props, "one" | "row"> {
  one: AllocationAnswer;
  stale: boolean;
}

function Details({ one, stale, shown, origin, lacksShapes }: DetailsProps) {
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
        {one.name !== null && <Fact of="name"><Name text={one.name} /></Fact>}
        {one.tensor !== null && <Fact of="tensor"><Name text={one.tensor} /></Fact>}
        {one.module !== null && one.module !== NOT_NAMED && <Fact of="module"><Name text={moduleLabel(one.module)} /></Fact>}
        {one.operator !== null && <Fact of="operator"><Name text={one.operator} /></Fact>}
        <Fact of="phase">{one.phase === "before" ? "before the window" : one.phase}</Fact>
        <Fact of="address" class="mono" data-testid="allocation-address">
          {/^0x0*$/.test(one.address) ? "not known" : `${one.address}_${one.version}`}
        </Fact>
        <Fact of="allocated">
          <When event={one.born_event} time={one.born_ns} none="before the window" origin={origin} />
        </Fact>
        <Fact of="freed">
          <When event={one.freed_event} time={one.freed_ns} none="not in the window" origin={origin} />
        </Fact>
        <Fact of="lived" title={exactTime(lived)}>
          {one.lifetime_ns === null ? `${duration(lived)} of the window` : duration(one.lifetime_ns)}
        </Fact>
        {!one.pool.startsWith("(") && (
          <Fact of="pool">
            {titleText(one.pool)}, {titleText(one.stream)}
          </Fact>
        )}
        {one.annotation !== null && <Fact of="annotation"><Name text={one.annotation} /></Fact>}
        {one.context !== null && <Fact of="compiled graph"><Name text={one.context} /></Fact>}
      </dl>
      {lacksShapes && (
        <p class="where" data-testid="lacks-shapes">
          <ShapesAreRecorded />
        </p>
      )}
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
