import { useState } from "preact/hooks";
import { useRemote } from "../../api/remote";
import { address } from "../../api/request";
import type { FailedRequests, ReserveCurve } from "../../api/types";
import { columnsIn } from "../../draw/axes";
import { navigate, route, stretch } from "../../state/app";
import { cellText, titleText } from "../../state/names";
import { grouped } from "../../state/numbers";
import { overOf, OVERS, wholeOf, zoomOf, zoomPatch } from "../../state/over";
import { KeyEntry } from "../key_entry";
import { RouteChoice } from "../route_choice";
import { Headline, Sentence } from "../sentence";
import { FailureState, Loading } from "../states";
import { SAME_WINDOW, useMoment } from "./moment";
import { Oom } from "./oom";
import { FreeBlocks, Pools } from "./pools";
import { ReserveChart } from "./reserve_chart";
import { Segments } from "./segments";
import { atMoment, headline } from "./sentences";
import { StatePanel } from "./state_panel";

/** What the allocator held at any moment: its reserve, the blocks in it, what lies free, and why a request failed. */
export function Allocator() {
  const part = stretch.value!;
  const pick = part.query;
  const [width, setWidth] = useState(0);
  const over = overOf(route.value);
  const window = zoomOf(route.value, over);
  const px = columnsIn(width);
  const range = window ? { t0: window[0], t1: window[1] } : {};
  const ready = width > 0;
  const curve = useRemote<ReserveCurve>(
    ready ? address("allocator_curve", { ...pick, over, ...range, px }) : null,
    window ? 70 : 0,
    SAME_WINDOW,
  );
  // The requests are those of the whole recording: another step has the same.
  const oom = useRemote<FailedRequests>(address("allocator_oom", { ...pick }), 0, ["step"]);
  const shown = oom.loading && !oom.data ? undefined : curve.data; // a report stands above the curve and would push it down
  const moment = useMoment(pick, shown);
  const state = moment.state.data;
  const origin = part.from;
  const whole = wholeOf(over, part.from, part.to, shown);
  const zoom = ([t0, t1]: [number, number]): void => {
    const all = !whole || (t0 <= whole[0] && t1 >= whole[1]);
    navigate(zoomPatch(over, all ? null : [t0, t1]));
  };
  const reset = (): void => (moment.reset(), navigate({ t0: undefined, t1: undefined, e0: undefined, e1: undefined }));
  if (curve.failure) return <FailureState failure={curve.failure} />;
  if (moment.state.failure) return <FailureState failure={moment.state.failure} />;
  const nothing = shown !== undefined && shown.reserved === null && !shown.knows_segments;
  if (nothing && !curve.stale) return <NotRecorded device={pick.device} reserve={false} />;
  const highest = shown ? Math.max(shown.reserved_peak?.bytes ?? 0, shown.peak.bytes) : 0;
  return (
    <>
      {shown && (
        <>
          <Headline
            testid="allocator-headline"
            pieces={headline(pick.device, shown, oom.data?.reports.find((one) => part.whole || one.step === pick.step))}
          />
          <p class="lead" data-testid="allocator-lead">
            {state && <Sentence pieces={atMoment(state)} />}
          </p>
        </>
      )}
      {oom.data && oom.data.ooms.length > oom.data.reports.length && (
        <p class="foot" data-testid="oom-count">
          {grouped(oom.data.ooms.length)} requests failed. Shown are the last ones, and the first of this{" "}
          {part.whole ? "window" : "step"}; the curve marks all.
        </p>
      )}
      {oom.data?.reports.map((report) => (
        <Oom
          key={report.number}
          report={report}
          origin={origin}
          shown={state?.event === report.event}
          onShow={() =>
            part.whole || report.step === pick.step
              ? moment.show(report.event, report.time_ns)
              : navigate({ step: String(report.step), t: String(report.time_ns), event: String(report.event) })
          }
        />
      ))}
      <div class="tools over-tools">
        <RouteChoice of="over" label="Over" testid="over" options={OVERS} value={over} />
        {window && (
          <button type="button" class="toggle" data-testid="reset-zoom" onClick={() => whole && zoom(whole)}>
            Whole {part.whole ? "window" : "step"}
          </button>
        )}
        <Key curve={shown} />
        <span class="hint">click or drag for a moment · ← → step through events · wheel to zoom</span>
      </div>
      <div class="beside">
        <section class="card chart-card" aria-busy={curve.loading}>
          <ReserveChart
            curve={shown}
            over={over}
            window={window ?? whole}
            whole={whole}
            origin={origin}
            highest={highest}
            at={over === "event" ? state?.event : state?.time_ns}
            onWidth={setWidth}
            onZoom={zoom}
            onScrub={(at) => moment.scrub(over, at)}
            onStep={moment.step}
            onReset={reset}
          />
          {!shown && <Loading what="the allocator's levels" />}
        </section>
        <StatePanel moment={moment} peak={shown?.peak} origin={origin} />
      </div>
      {shown?.knows_segments && <Segments pick={pick} moment={moment} highest={highest} origin={origin} />}
      {shown && !shown.knows_segments && <NotRecorded device={pick.device} reserve />}
      {state && (
        <>
          {state.knows_segments && <Pools state={state} />}
          <div class="pair">
            {state.knows_segments && <FreeBlocks state={state} />}
            <Settings settings={state.settings} />
          </div>
        </>
      )}
    </>
  );
}

/** What the chart's colors and lines mean. */
export function Key({ curve }: { curve: ReserveCurve | undefined }) {
  const pending = curve?.pending.some((bytes) => bytes > 0);
  return (
    <span class="keys" aria-hidden="true">
      <KeyEntry look="swatch level-allocated">allocated</KeyEntry>
      {pending && (
        <KeyEntry look="swatch level-pending">pending</KeyEntry>
      )}
      {curve?.reserved && (
        <>
          <KeyEntry look="line dashes">reserved</KeyEntry>
          <KeyEntry look="swatch level-unused" title="(reserved − allocated) / reserved">
            unused, below as a share
          </KeyEntry>
        </>
      )}
      {curve !== undefined && curve.split.length > 0 && (
        <KeyEntry look="dots" title="1 − largest free block / all free memory">
          free, but in pieces
        </KeyEntry>
      )}
    </span>
  );
}

/** What to record, where a window has no reserved memory or no segments. */
function NotRecorded({ device, reserve }: { device: string; reserve: boolean }) {
  const cpu = !/^(cuda|xpu|hip)/.test(device);
  return (
    <section class="state" data-testid="no-segments">
      <h1>
        {reserve
          ? "This window shows how much was reserved, but not where: its segments were not recorded."
          : `This window has no record of reserved memory on ${titleText(device)}.`}
      </h1>
      {cpu && (
        <p>
          The CPU's allocator does not keep reserved memory: it takes each block from the C library and gives it back.
          Pick a GPU to see its segments.
        </p>
      )}
      <p>
        To see segments, blocks and free gaps of a CUDA or XPU device, record the allocator's history too:
      </p>
      <pre class="code" data-testid="snapshot-code">
        {`handler = memory_trace_handler("runs/first", model=model, optimizer=optimizer, snapshot=True)`}
      </pre>
      <p>
        or import a snapshot that <span class="mono">torch.cuda.memory._dump_snapshot()</span> wrote, from any machine:
      </p>
      <pre class="code">tb-memplugin import snapshot.pickle --logdir LOGDIR</pre>
    </section>
  );
}

/** What the source tells of the allocator's settings and of itself. */
function Settings({ settings }: { settings: Record<string, string> }) {
  const rows = Object.entries(settings).filter(([, value]) => value !== "");
  if (rows.length === 0) return null;
  return (
    <section class="card" data-testid="settings" aria-label="Settings">
      <h2>Settings</h2>
      <dl class="settings">
        {rows.map(([name, value]) => (
          <div key={name}>
            <dt class="mono" title={titleText(name)}>
              {cellText(name)}
            </dt>
            <dd class="mono breaking" title={titleText(value)}>
              {cellText(value)}
            </dd>
          </div>
        ))}
      </dl>
    </section>
  );
}
