import { address } from "../../api/request";
import { useRemote } from "../../api/remote";
import type { LineTableAnswer, SourceLine, StacksAnswer } from "../../api/types";
import { navigate, route, stretch } from "../../state/app";
import { asPartOf, exactBytes, percent, withUnit } from "../../state/bytes";
import { lineParts } from "../../state/frames";
import { capital, shortened, visible } from "../../state/names";
import { counted } from "../../state/numbers";
import type { Piece } from "../../state/sentences";
import { duration } from "../../state/time";
import { Notice } from "../notices";
import { RouteChoice } from "../route_choice";
import { Segmented } from "../segmented";
import { Headline } from "../sentence";
import { FailureState, Loading } from "../states";
import { choice, SAME_RUN } from "./choice";
import { FlameView, FRAMES } from "./flame_view";
import { MomentStrip } from "./moment_strip";
import { NoStacks } from "./no_stacks";
import { Tables } from "./tables";

const WHENS = (whole: boolean) =>
  [
    ["peak", "At the peak"],
    ["moment", "At a moment"],
    ["step", `Allocated in the ${whole ? "window" : "step"}`],
  ] as const;
type When = ReturnType<typeof WHENS>[number][0];

/** Which code allocated what: a flame graph, and tables of stacks, source lines and custom rules. */
export function Stacks() {
  const shown = stretch.value!;
  const pick = shown.query;
  const { search = "", node: wanted } = route.value;
  const node = /^\d{1,15}$/.test(wanted ?? "") ? wanted : undefined;
  const chosen = choice();
  const frames = FRAMES.find(([key]) => key === route.value.frames)?.[0] ?? "folded";
  const query = { ...pick, ...chosen.query };
  const answer = useRemote<StacksAnswer>(
    address("stacks", { ...query, frames, node, find: search || undefined, px: 1600 }),
    60,
    SAME_RUN,
  );
  const top = useRemote<LineTableAnswer>(address("line_table", { ...query, count: 2 }), 0, SAME_RUN);
  if (answer.failure && node !== undefined && answer.status === 400) return <NoSuchFrame node={node} />;
  if (answer.failure) return <FailureState failure={answer.failure} />;
  const data = answer.data;
  if (!data) return <Loading what="the call stacks" />;
  if (!data.knows_stacks) return <NoStacks pick={pick} />;
  const when = chosen.of === "step" ? "step" : chosen.chosen ? "moment" : "peak";
  const origin = shown.from;
  const pickWhen = (to: When): void => {
    const at = { t: String(data.time_ns ?? shown.peak.time), event: String(data.event ?? -1) };
    if (to === "moment") navigate(data.event === null ? { of: undefined, t: String(shown.peak.time) } : { of: undefined, ...at });
    else navigate({ of: to === "step" ? "step" : undefined, t: undefined, event: undefined });
  };
  return (
    <>
      <Headline pieces={headline(data, top.data, when, shown.name, origin)} />
      <div class="tools">
        <Segmented label="Which allocations" testid="when" options={WHENS(shown.whole)} value={when} onPick={pickWhen} />
        <RouteChoice of="frames" label="Frames" testid="frames" options={FRAMES} value={frames} usual="folded" />
        <input
          class="search"
          type="search"
          placeholder="Search frames (function, file)"
          aria-label="Search frames"
          data-testid="stack-search"
          value={search}
          maxLength={400}
          onInput={(e) => navigate({ search: e.currentTarget.value || undefined })}
        />
        {data.found && search !== "" && (
          <span class="found" role="status" data-testid="stack-found" title={exactBytes(data.found.bytes)}>
            {asPartOf(data.bytes, data.found.bytes)} ({percent(data.found.bytes, data.bytes)}) in{" "}
            {counted(data.found.count, "allocation")}
          </span>
        )}
      </div>
      {wanted !== node && <NoSuchFrame node={wanted!} />}
      {when !== "step" && <MomentStrip pick={pick} event={data.event} time={data.time_ns} />}
      <div class={answer.stale ? "stale" : undefined} aria-busy={answer.stale}>
        <FlameView answer={data} searching={search !== ""} frames={frames} />
      </div>
      <Tables query={query} search={search} />
    </>
  );
}

/** Where the address zooms to a frame that is not one of these: says so, with the way to all of them. */
function NoSuchFrame({ node }: { node: string }) {
  return (
    <Notice level="warning" testid="missing-frame">
      The address zooms to frame {shortened(visible(node), 80)}, which is not here.{" "}
      <button type="button" class="quiet" onClick={() => navigate({ node: undefined })}>
        Forget it
      </button>
    </Notice>
  );
}

/** "At the peak, 7.88 GiB were alive, 5.01 GiB of it from `model.py:20 forward`." */
function headline(
  data: StacksAnswer,
  lines: LineTableAnswer | undefined,
  when: string,
  step: string,
  origin: number,
): Piece[] {
  const size = { strong: withUnit(data.bytes), exact: data.bytes };
  const at = data.time_ns === null ? "" : duration(data.time_ns - origin);
  const start: Piece[] =
    when === "step"
      ? [`${capital(step)} allocated `, size, ` in ${counted(data.count, "allocation")}`]
      : [when === "peak" ? `At the peak of ${step}, ` : `At ${at} of ${step}, `, size, " were alive"];
  const matching = lines?.bytes === data.bytes && lines.event === data.event;
  if (!lines || !matching || data.bytes === 0) return [...start, "."];
  const parts = lines.rows[0]?.kind === "none" ? lines.rows : lines.rows.slice(0, 1);
  return [...start, ...parts.flatMap((row, i) => from(row, data.bytes, i === 0 ? ", " : ", and ")), "."];
}

function from(row: SourceLine, whole: number, lead: string): Piece[] {
  const share = { strong: asPartOf(whole, row.bytes), exact: row.bytes };
  if (row.kind === "none") return [lead, share, " of it without a recorded stack"];
  const { place, name } = lineParts(row.line);
  return [lead, share, lead === ", " ? " of it from " : " from ", { name: name ? `${place} ${name}` : place }];
}
