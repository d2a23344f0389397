import { address } from "../../api/request";
import { useRemote } from "../../api/remote";
import type { CompareAnswer, CurveAnswer } from "../../api/types";
import { reserveFits } from "../../draw/stack";
import { type Unit, withUnit } from "../../state/bytes";
import { CATEGORIES } from "../../state/categories";
import { duration, timeUnitFor } from "../../state/time";
import { capital } from "../../state/names";
import type { Pick } from "../../state/selection";
import { sideName } from "../../state/sentences";
import { usePaint, useSurface } from "../canvas";
import { Name } from "../name";
import { Notice } from "../notices";
import { RouteLink } from "../route_link";
import { Loading } from "../states";
import { Category } from "../category";
import { paintOver, paintSide, SIDE_HEIGHT } from "./paint";
import { KeyEntry } from "../key_entry";

interface Props {
  pick: Pick;
  basis: Pick;
  answer: CompareAnswer;
  unit: Unit;
  over: boolean;
}

/** Both steps' curves on one scale: side by side, or one over the other by time since their start. */
export function Curves({ pick, basis, answer, unit, over }: Props) {
  const px = over ? 1600 : 1000;
  const baseCurve = useRemote<CurveAnswer>(
    address("curve", {
      run: basis.run,
      worker: basis.worker,
      step: basis.step,
      device: basis.device,
      by: "category",
      px,
    }),
  );
  const otherCurve = useRemote<CurveAnswer>(
    address("curve", { run: pick.run, worker: pick.worker, step: pick.step, device: pick.device, by: "category", px }),
  );
  const failure = baseCurve.failure ?? otherCurve.failure;
  if (failure)
    return (
      <Notice level="warning">
        The curves could not be read: {failure.what} {failure.fix}
      </Notice>
    );
  const [a, b] = [baseCurve.data, otherCurve.data];
  const names = { base: sideName(answer.base, answer.other), other: sideName(answer.other, answer.base) };
  const both = a && b ? [a, b] : [];
  const coarse = both.some((curve) => !curve.exact);
  return (
    <>
      {over ? (
        <section class="card">
          <div class="row">
            <KeyEntry look="line dashes">
              <Name text={names.base} prose /> {withUnit(answer.base.peak_bytes, unit)}
            </KeyEntry>
            <KeyEntry look="line solid">
              <Name text={names.other} prose /> {withUnit(answer.other.peak_bytes, unit)}
            </KeyEntry>
            <span class="key muted grow">time since each step began</span>
          </div>
          <Picture
            label={`Allocated memory of ${names.base} and ${names.other}, one over the other.`}
            testid="curves-over"
            paint={a && b ? (canvas, width) => paintOver(canvas, width, a, b, unit) : undefined}
            deps={[a, b]}
          />
        </section>
      ) : (
        <div class="pair">
          <Side name={names.base} pick={basis} bytes={answer.base.peak_bytes} curve={a} all={both} unit={unit} />
          <Side name={names.other} pick={pick} bytes={answer.other.peak_bytes} curve={b} all={both} unit={unit} />
        </div>
      )}
      {!over && both.length === 2 && <Legend curves={both} />}
      {coarse && (
        <div style={{ marginTop: "10px" }}>
          <Notice level="warning" testid="coarse-notice">
            At least one of the curves is coarse: its side file is not here, so it shows the summary's few points.
          </Notice>
        </div>
      )}
    </>
  );
}

/** What the colors of both pictures are, from the bottom. */
function Legend({ curves }: { curves: CurveAnswer[] }) {
  const drawn = CATEGORIES.filter((key) =>
    curves.some((curve) => curve.stacks[curve.keys.indexOf(key)]?.some((bytes) => bytes > 0)),
  );
  return (
    <ul class="legend" data-testid="curves-key">
      {drawn.map((key) => (
        <li key={key}>
          <Category of={key} />
        </li>
      ))}
      {curves.some((curve) => curve.reserved) && reserveFits(curves) && (
        <li>
          <span class="line dashes" aria-hidden="true" /> reserved
        </li>
      )}
    </ul>
  );
}

function took({ t0, t1 }: CurveAnswer): number {
  return t1 - t0;
}

function Side({
  name,
  pick,
  bytes,
  curve,
  all,
  unit,
}: {
  name: string;
  pick: Pick;
  bytes: number;
  curve: CurveAnswer | undefined;
  all: CurveAnswer[];
  unit: Unit;
}) {
  const link = {
    view: "timeline",
    run: pick.run,
    worker: pick.worker,
    device: pick.device,
    step: String(pick.step),
  } as const;
  return (
    <section class="card">
      <h2 class="row">
        <RouteLink to={link}>
          <Name text={capital(name)} prose />
        </RouteLink>
        <span class="amount">{withUnit(bytes, unit)}</span>
        {curve && <span class="muted">took {duration(took(curve), timeUnitFor(took(curve), ...all.map(took)))}</span>}
      </h2>
      <Picture
        label={`Allocated memory of ${name}; peak ${withUnit(bytes, unit)}.`}
        testid="curve-side"
        paint={curve && all.length === 2 ? (canvas, width) => paintSide(canvas, width, curve, all, unit) : undefined}
        deps={[curve, all.length]}
      />
    </section>
  );
}

/** A canvas as wide as its box, painted anew when its data, its width or the theme changes. */
function Picture({
  label,
  testid,
  paint,
  deps,
}: {
  label: string;
  testid: string;
  paint: ((canvas: HTMLCanvasElement, width: number) => void) | undefined;
  deps: unknown[];
}) {
  const { box, canvas, width } = useSurface();
  usePaint(canvas, width > 0 && paint && ((to) => paint(to, width)), [...deps, width]);
  return (
    <div ref={box} class="stage" style={{ height: `${SIDE_HEIGHT}px`, overflow: "hidden" }} aria-busy={!paint}>
      <canvas ref={canvas} role="img" aria-label={label} data-testid={testid} />
      {!paint && <Loading what="the curve" />}
    </div>
  );
}
