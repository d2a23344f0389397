import { useMemo, useState } from "preact/hooks";
import { useRemote } from "../../api/remote";
import { address } from "../../api/request";
import type { CurveAnswer, CurveBy, LanesAnswer, Over, StepAnswer } from "../../api/types";
import { columnsIn, EVENT_AXIS, plotWidth, TIME_AXIS } from "../../draw/axes";
import { DEEPEST } from "../../draw/lanes";
import { kept, reserveFits } from "../../draw/stack";
import { alone, navigate, picked, route, selection } from "../../state/app";
import { unitFor } from "../../state/bytes";
import { categoryLabel } from "../../state/categories";
import { openedGroups, withClosed } from "../../state/module_groups";
import { shortened, titleText, visible } from "../../state/names";
import { counted } from "../../state/numbers";
import { overOf, OVERS, wholeOf, zoomOf, zoomPatch } from "../../state/over";
import { stepName } from "../../state/sentences";
import { Swatch } from "../category";
import { divisionLabel, isOurs, partLabel, useDivisions } from "../divisions";
import { useFailed } from "../failed";
import { Name } from "../name";
import { Notice } from "../notices";
import { RouteChoice } from "../route_choice";
import { Segmented, Toggle } from "../segmented";
import { FailureState, Loading } from "../states";
import { aboutTimes } from "../times";
import { Chart } from "./chart";
import { type Moment, placeOf, useCursor } from "./cursor";
import { wantFocus } from "./group_focus";
import { MomentPanel } from "./moment_panel";
import { StretchPanel } from "./stretch_panel";

/** Offered until it is known what the window can be divided by. */
const FEW = ["category", "module", "phase"];

/** The curve of one step or of a whole recorded window, its lanes, and beside it the state at the cursor. */
export function Timeline() {
  const pick = picked.value!;
  const { stats: ofStep, window: recorded } = selection.value!;
  const stats = ofStep!;
  const all = route.value.span === "window" && recorded.steps.length > 1;
  const drawn = all ? { ...pick, span: "window" } : pick;
  const [width, setWidth] = useState(0);
  const divisions = useDivisions(pick, FEW, route.value.by);
  const by: CurveBy = divisions.find((one) => one === route.value.by) ?? "category";
  const folds = by === "module" && route.value.fold !== "off";
  const folding = folds ? { fold: "1", open: route.value.opened } : {};
  const [from, to] = all ? [recorded.from, recorded.to] : [stats.step_start_ns, stats.step_end_ns];
  const px = columnsIn(width);
  const asked = overOf(route.value);
  const inAddress = zoomOf(route.value, asked);
  const outside = asked === "time" && inAddress && (inAddress[1] <= from || inAddress[0] >= to);
  const zoomTo = outside ? undefined : inAddress;
  const range = zoomTo ? { t0: zoomTo[0], t1: zoomTo[1] } : {};
  const axis = asked === "event" ? { over: asked } : {};
  const wait = zoomTo ? 70 : 0;
  const ready = width > 0;
  const curve = useRemote<CurveAnswer>(
    ready ? address("curve", { ...drawn, by, ...folding, ...axis, ...range, px }) : null,
    wait,
    SAME_STEP,
  );
  const plain = by === "category" && !zoomTo; // then the curve and the strip are one request
  const rest = useRemote<CurveAnswer>(ready && !plain ? address("curve", { ...drawn, by: "category", ...axis, px }) : null);
  const strip = plain ? (curve.stale ? undefined : curve.data) : rest.data;
  const coarse = curve.data?.exact === false || strip?.exact === false;
  const over: Over = coarse ? "time" : asked;
  const whole = wholeOf(over, from, to, curve.data ?? strip);
  const window = within(over === asked ? zoomTo : undefined, whole);
  const zoomed = whole !== undefined && (window[0] !== whole[0] || window[1] !== whole[1]);
  const lanes = useRemote<LanesAnswer>(
    ready && whole ? address("lanes", { ...drawn, ...(over === asked ? { ...axis, ...range } : {}), px: plotWidth(width) }) : null,
    wait,
    SAME_STEP,
  );
  const step = useRemote<StepAnswer>(address("step", pick));
  const times = aboutTimes(step.data);
  const absent = step.data?.source.side_file;
  const shown = curve.data ?? (coarse ? strip : undefined);
  const zoom = ([t0, t1]: [number, number]): void =>
    navigate(zoomPatch(over, !whole || (t0 <= whole[0] && t1 >= whole[1]) || t1 <= t0 ? null : [t0, t1]));
  const follow = (place: number): void => {
    const half = (window[1] - window[0]) / 2;
    if (whole && (place < window[0] || place > window[1])) zoom(kept([place - half, place + half], whole));
  };
  /** The other axis shows the same stretch, where there is an event in it. */
  const turn = (to: Over): void => {
    const answered = curve.stale ? undefined : curve.data;
    const same = to === "event" ? answered?.events : answered?.times;
    if (to !== over) navigate({ over: to, ...zoomPatch(over, null), ...zoomPatch(to, zoomed && same && same[1] > same[0] ? same : null) });
  };
  const inSight = zoomed && !curve.stale ? curve.data?.peak : undefined;
  const highest = inSight && { t: inSight.time_ns, event: inSight.event };
  const cursor = useCursor({ pick, of: JSON.stringify(drawn), over, by, folding, curve: shown, whole: strip, highest, coarse }, follow);
  const peak = strip?.peak ?? (all ? undefined : { bytes: stats.peak_bytes, time_ns: stats.peak_time_ns, event: undefined });
  const reports = useFailed(pick, stats, all ? recorded.steps.map((one) => one.step) : [pick.step]);
  const failed = useMemo(
    () => reports.map((one) => ({ place: placeOf({ t: one.time_ns, event: one.event }, over)!, bytes: one.requested_bytes })),
    [JSON.stringify(reports.map((one) => one.event)), over],
  );
  const { words } = over === "event" ? EVENT_AXIS : TIME_AXIS;
  const reserves = strip?.reserved ? reserveFits([strip]) : true;
  const reserve = route.value.reserve === undefined ? reserves : route.value.reserve === "on";
  const what = all ? `steps ${recorded.steps[0]!.step} to ${recorded.steps.at(-1)!.step}` : stepName(pick.step, alone.value);
  if (curve.failure && !coarse) return <FailureState failure={curve.failure} />;
  return (
    <>
      <h1 class="unseen">Memory over time, {what}</h1>
      <div class="tools">
        <RouteChoice
          of="by"
          label="Color by"
          testid="by"
          options={divisions.map((one) => [one, divisionLabel(one)] as const)}
          value={by}
        />
        {!coarse && <Segmented label="Over" testid="over" options={OVERS} value={over} onPick={turn} />}
        {by === "module" && (
          <Toggle
            text="Fold layers"
            testid="fold-layers"
            on={folds}
            onFlip={() => navigate({ fold: folds ? "off" : undefined, opened: undefined })}
          />
        )}
        {folds && openedGroups(route.value.opened).map((key) => <Opened key={key} name={key} />)}
        {zoomed && (
          <button type="button" class="toggle" data-testid="reset-zoom" onClick={() => zoom(whole)}>
            Whole {all ? "window" : "step"}
          </button>
        )}
        {strip?.reserved && (
          <Toggle
            text="Reserve"
            testid="reserve"
            on={reserve}
            onFlip={() => navigate({ reserve: reserve !== reserves ? undefined : reserve ? "off" : "on" })}
          />
        )}
        {!coarse && (
          <span class="hint in-line">
            {zoomed
              ? `showing ${words(window[1] - window[0])} of ${words(whole[1] - whole[0])} · Esc resets`
              : "drag or wheel to zoom, Esc to reset · ← → next event · M marks"}
          </span>
        )}
      </div>
      {coarse && (
        <Notice level="warning" testid="coarse-notice">
          This curve is coarse: the side file with the step's events{" "}
          {absent && <span class="mono">{titleText(absent)} </span>}
          cannot be read here, so it shows the summary's few points, and neither zoom nor single moments. Copy the run's
          folder plugins/tb_memplugin from the machine that recorded it, then reload.
        </Notice>
      )}
      <div class="beside">
        <section class="card chart-card" aria-busy={curve.loading}>
          <Chart
            by={by}
            curve={shown}
            strip={strip}
            lanes={alone.value ? asWhole(lanes.data) : lanes.data}
            window={window}
            whole={whole ?? window}
            axis={over === "event" ? EVENT_AXIS : TIME_AXIS}
            cursor={cursor}
            peakBytes={peak?.bytes ?? stats.peak_bytes}
            peakPlace={peak && whole && placeWithin({ t: peak.time_ns, event: peak.event }, over, whole)}
            failed={failed}
            reserve={reserve}
            canZoom={!coarse && whole !== undefined}
            onWidth={setWidth}
            onZoom={zoom}
          />
          {!shown && <Loading what="the curve" />}
          {shown && <Legend curve={shown} by={by} reserve={reserve} />}
          {times && <p class="foot" data-testid="about-times">{times}</p>}
          {lanes.failure && <p class="foot">The lanes could not be read: {lanes.failure.what}</p>}
          {lanes.data && lanes.data.omitted > 0 && (
            <p class="foot">
              {counted(lanes.data.omitted, "module call is", "module calls are")} narrower than a pixel here; zoom in to see{" "}
              {lanes.data.omitted === 1 ? "it" : "them"}.
            </p>
          )}
          {lanes.data && lanes.data.modules.length > DEEPEST && (
            <p class="foot" data-testid="deeper-lanes">
              The outermost {DEEPEST} of {lanes.data.modules.length} levels of modules are drawn.
            </p>
          )}
        </section>
        <div class="column">
          {zoomed && !coarse && (
            <StretchPanel
              query={{ ...drawn, ...axis, t0: window[0], t1: window[1] }}
              lanes={lanes.stale ? undefined : lanes.data}
              origin={from}
              page={unitFor(peak?.bytes ?? stats.peak_bytes)}
            />
          )}
          <MomentPanel
            by={by}
            over={over}
            cursor={cursor}
            origin={from}
            peakBytes={peak?.bytes ?? stats.peak_bytes}
            within={all ? recorded : undefined}
          />
        </div>
      </div>
    </>
  );
}

/** A group that was opened; a click folds it again. */
function Opened({ name }: { name: string }) {
  const close = (): void => {
    wantFocus({ closed: name });
    navigate({ opened: withClosed(route.value.opened, name) });
  };
  return (
    <button
      type="button"
      class="toggle chip"
      data-testid="close-group"
      title={`Fold ${titleText(name)} again`}
      onClick={close}
    >
      <span class="mono">{shortened(visible(name), 32)}</span> <span aria-hidden="true">×</span>
      <span class="unseen"> fold again</span>
    </button>
  );
}

/** What of a query may differ for an old answer to stay on show. */
const SAME_STEP = ["t0", "t1", "px", "open", "fold"];

/** A recording in which nothing marked any steps is no step 0. */
function asWhole(lanes: LanesAnswer | undefined): LanesAnswer | undefined {
  return lanes && { ...lanes, steps: lanes.steps.map((span) => ({ ...span, name: "whole window" })) };
}

/** What the address zooms to, as far as that exists; else everything, once that is known. */
function within(zoom: [number, number] | undefined, whole: [number, number] | undefined): [number, number] {
  if (!whole) return zoom ?? [0, 1];
  const [from, to] = zoom ? [Math.max(whole[0], zoom[0]), Math.min(whole[1], zoom[1])] : whole;
  return to > from ? [from, to] : whole;
}

/** A peak that was there before the first event is drawn at the beginning. */
function placeWithin(peak: Moment, over: Over, whole: [number, number]): number | undefined {
  const place = placeOf(peak, over);
  return place === undefined ? undefined : Math.max(whole[0], place);
}

/** What every color of the picture is, from its bottom: also of parts that are not alive at the cursor. */
export function Legend({ curve, by, reserve }: { curve: CurveAnswer; by: string; reserve: boolean }) {
  const drawn = curve.keys.flatMap((key, index) => (curve.stacks[index]?.some((bytes) => bytes > 0) ? [{ key, index }] : []));
  return (
    <ul class="legend" data-testid="timeline-key" aria-label="Colors of the picture">
      {drawn.map(({ key, index }) => (
        <li key={key} data-key={key}>
          <Swatch by={by} of={key} index={index} />
          {isOurs(by) ? categoryLabel(key) : <Name text={partLabel(by, curve.labels?.[index] ?? key)} module={by === "module"} />}
        </li>
      ))}
      {curve.reserved && reserve && (
        <li>
          <span class="line dashes" aria-hidden="true" /> reserved
        </li>
      )}
    </ul>
  );
}
