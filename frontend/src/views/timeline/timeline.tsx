import { useState } from "preact/hooks";
import { address } from "../../api/request";
import { useRemote } from "../../api/remote";
import type { CurveAnswer, CurveBy, LanesAnswer, StepAnswer } from "../../api/types";
import { kept, reserveFits } from "../../draw/stack";
import { sharpness } from "../../draw/surface";
import { alone, navigate, picked, route, selection } from "../../state/app";
import { openedGroups, withClosed } from "../../state/module_groups";
import { shortened, titleText, visible } from "../../state/names";
import { grouped } from "../../state/numbers";
import { stepName } from "../../state/sentences";
import { duration } from "../../state/time";
import { divisionLabel, useDivisions } from "../divisions";
import { Notice } from "../notices";
import { Segmented, Toggle } from "../segmented";
import { FailureState, Loading } from "../states";
import { aboutTimes } from "../times";
import { Chart } from "./chart";
import { useCursor } from "./cursor";
import { wantFocus } from "./group_focus";
import { MomentPanel } from "./moment_panel";

/** Offered until it is known what the window can be divided by. */
const FEW = ["category", "module", "phase"];
const MARGIN = { left: 78, right: 12 };

/** The curve of one step or of a whole recorded window, its lanes, and beside it the state at the cursor. */
export function Timeline() {
  const pick = picked.value!;
  const { stats: ofStep, window: recorded } = selection.value!;
  const stats = ofStep!;
  const all = route.value.span === "window" && recorded.steps.length > 1;
  const drawn = all ? { ...pick, step: "all", window_step: pick.step } : pick;
  const [width, setWidth] = useState(0);
  const divisions = useDivisions(pick, FEW, route.value.by);
  const by: CurveBy = divisions.find((one) => one === route.value.by) ?? "category";
  const folds = by === "module" && route.value.fold !== "off";
  const folding = folds ? { fold: "1", open: route.value.opened } : {};
  const whole: [number, number] = all ? [recorded.from, recorded.to] : [stats.step_start_ns, stats.step_end_ns];
  const window = windowOf(route.value.t0, route.value.t1, whole);
  const zoomed = window[0] !== whole[0] || window[1] !== whole[1];
  const inner = Math.max(1, width - MARGIN.left - MARGIN.right);
  const px = Math.min(4000, Math.max(1, Math.round(inner * sharpness())));
  const range = zoomed ? { t0: window[0], t1: window[1] } : {};
  const ready = width > 0;
  const curve = useRemote<CurveAnswer>(
    ready ? address("curve", { ...drawn, by, ...folding, ...range, px }) : null,
    zoomed ? 70 : 0,
    sameStep,
  );
  const plain = by === "category" && !zoomed; // then the curve and the strip are one request
  const rest = useRemote<CurveAnswer>(ready && !plain ? address("curve", { ...drawn, by: "category", px }) : null);
  const strip = plain ? (curve.stale ? undefined : curve.data) : rest.data;
  const lanes = useRemote<LanesAnswer>(
    ready ? address("lanes", { ...pick, t0: window[0], t1: window[1], px: inner }) : null,
    zoomed ? 70 : 0,
    sameStep,
  );
  const coarse = curve.data?.exact === false || strip?.exact === false;
  const step = useRemote<StepAnswer>(address("step", pick));
  const times = aboutTimes(step.data);
  const absent = step.data?.source.side_file;
  const shown = curve.data ?? (coarse ? strip : undefined);
  const zoom = ([t0, t1]: [number, number]): void =>
    navigate(t0 <= whole[0] && t1 >= whole[1] ? { t0: undefined, t1: undefined } : { t0: String(t0), t1: String(t1) });
  const follow = (t: number): void => {
    const half = (window[1] - window[0]) / 2;
    if (t < window[0] || t > window[1]) zoom(kept([t - half, t + half], whole));
  };
  const cursor = useCursor(pick, JSON.stringify(drawn), by, folding, shown, strip, coarse, follow);
  const peak = all ? strip?.peak : { bytes: stats.peak_bytes, time_ns: stats.peak_time_ns };
  const reserves = strip?.reserved ? reserveFits([strip]) : true;
  const reserve = route.value.reserve === undefined ? reserves : route.value.reserve === "on";
  const what = all ? `steps ${recorded.steps[0]!.step} to ${recorded.steps.at(-1)!.step}` : stepName(pick.step, alone.value);
  if (curve.failure && !coarse) return <FailureState failure={curve.failure} onRetry={curve.retry} />;
  return (
    <>
      <h1 class="unseen">Memory over time, {what}</h1>
      <div class="tools">
        <Segmented
          label="Colour by"
          testid="by"
          options={divisions.map((one) => [one, divisionLabel(one)] as const)}
          value={by}
          onPick={(value) => navigate({ by: value })}
        />
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
        {zoomed && (
          <span class="muted">
            showing {duration(window[1] - window[0])} of {duration(whole[1] - whole[0])}
          </span>
        )}
        {!coarse && (
          <span class="hint">
            drag or wheel to zoom · double-click or Esc to reset · ← → step through events
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
            lanes={lanes.data}
            window={window}
            whole={whole}
            margin={MARGIN}
            cursor={cursor}
            peakBytes={peak?.bytes ?? stats.peak_bytes}
            peakTime={peak?.time_ns ?? stats.peak_time_ns}
            reserve={reserve}
            canZoom={!coarse}
            onWidth={setWidth}
            onZoom={zoom}
          />
          {!shown && <Loading what="the curve" />}
          {times && <p class="foot" data-testid="about-times">{times}</p>}
          {lanes.failure && <p class="foot">The lanes could not be read: {lanes.failure.what}</p>}
          {lanes.data && lanes.data.omitted > 0 && (
            <p class="foot">
              {lanes.data.omitted === 1 ? "1 module call is" : `${grouped(lanes.data.omitted)} module calls are`} narrower
              than a pixel here; zoom in to see them.
            </p>
          )}
        </section>
        <MomentPanel
          by={by}
          cursor={cursor}
          origin={whole[0]}
          peakBytes={peak?.bytes ?? stats.peak_bytes}
          within={all ? recorded : undefined}
        />
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

function sameStep(path: string): string {
  return path.replace(/&(t0|t1|px|open|fold)=[^&]*/g, "");
}

function windowOf(t0: string | undefined, t1: string | undefined, whole: [number, number]): [number, number] {
  const [from, to] = [Number(t0), Number(t1)];
  if (t0 === undefined || t1 === undefined || !(to > from)) return whole;
  return [Math.max(whole[0], Math.round(from)), Math.min(whole[1], Math.round(to))];
}
