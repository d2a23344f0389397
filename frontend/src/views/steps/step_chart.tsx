import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { StepsAnswer } from "../../api/types";
import { across } from "../../draw/axes";
import { navigate } from "../../state/app";
import { exactBytes, withUnit } from "../../state/bytes";
import { counted } from "../../state/numbers";
import { usePaint, useSurface } from "../canvas";
import { KeyEntry } from "../key_entry";
import { useDrag } from "../timeline/drag";
import { Tip } from "../tip";
import { BOTTOM, heights, highest, type Marks, paintSteps, reserveIsNear, TOP } from "./paint";

/** Pixels around a recorded step in which a click means it. */
const NEAR = 7;

interface Props {
  data: StepsAnswer;
  marks: Marks;
  /** Whether a drag zooms to the steps that it goes over. */
  zooms?: boolean;
}

/** The peaks of steps, few or very many; a click picks a step. */
export function StepChart({ data, marks, zooms = false }: Props) {
  const { box, canvas, width } = useSurface();
  const height = useRef(0);
  const [at, setAt] = useState<number | undefined>(undefined);
  const x = across([data.first[0]!, Math.max(data.last.at(-1)!, data.first[0]! + 1)], width);
  const y = useMemo(() => heights(data), [data]);
  const drag = useDrag(x, width, {
    onHover: (step) => setAt(step === undefined ? undefined : nearest(data.high_step, step)),
    onClick: (step) => {
      const recorded = marks.recorded.find(([one, size]) => Math.hypot(x(one) - x(step), y(size) - height.current) <= NEAR);
      navigate({ step: String(recorded?.[0] ?? data.high_step[nearest(data.high_step, step)]) });
    },
    onRange: (from, to) => {
      const [first, last] = [Math.ceil(from), Math.floor(to)];
      if (zooms && last > first) navigate({ s0: String(first), s1: String(last) });
    },
  });
  useEffect(() => setAt(undefined), [data]);
  usePaint(canvas, width > 0 && ((to) => paintSteps(to, width, { data, marks, x, y, at })), [data, JSON.stringify(marks), at, width]);
  const low = data.low.reduce((a, b) => Math.min(a, b), Infinity);
  const words = `Peak of ${counted(data.count, "step")}, from ${withUnit(low)} to ${withUnit(highest(data.high))}; step ${marks.step} is picked.`;
  return (
    <div ref={box} class="plot">
      <canvas
        ref={canvas}
        role="img"
        aria-label={words}
        data-testid="steps-plot"
        data-box={JSON.stringify([x.range[0], TOP, x.range[1] - x.range[0], BOTTOM - TOP])}
        {...drag.handlers}
        onPointerDown={(event) => ((height.current = event.offsetY), drag.handlers.onPointerDown(event))}
      />
      {zooms && drag.box && (
        <span class="zoom-box" style={{ left: `${drag.box[0]}px`, width: `${drag.box[1] - drag.box[0]}px`, height: `${BOTTOM}px` }} />
      )}
      {at !== undefined && data.high[at] !== undefined && (
        <Tip x={x(data.high_step[at]!)} y={0} testid="steps-tip">
          <Told data={data} column={at} />
        </Tip>
      )}
    </div>
  );
}

/** What the line and the reserve are; a reserve that would flatten the line is named instead of drawn. */
export function StepKey({ data, measured }: { data: StepsAnswer | undefined; measured: string }) {
  const reserved = highest(data?.reserved ?? []);
  return (
    <>
      <KeyEntry look="line solid">{measured}</KeyEntry>
      {data && reserved > 0 && (reserveIsNear(data) ? (
        <KeyEntry look="line dashes">reserved</KeyEntry>
      ) : (
        <span class="key">↑ reserved {withUnit(reserved)}, not drawn</span>
      ))}
    </>
  );
}

/** One step, or of several steps in a column the highest and the lowest. */
function Told({ data, column }: { data: StepsAnswer; column: number }) {
  const [first, last, high] = [data.first[column]!, data.last[column]!, data.high[column]!];
  const reserved = data.reserved?.[column];
  return (
    <>
      {first === last ? `step ${first}` : `steps ${first} to ${last}, highest in step ${data.high_step[column]}`}
      <br />
      <strong>{withUnit(high)}</strong> · {exactBytes(high)}
      {first !== last && (
        <>
          <br />
          lowest {withUnit(data.low[column]!)}
        </>
      )}
      {reserved != null && (
        <>
          <br />
          reserved {withUnit(reserved)}
        </>
      )}
    </>
  );
}

/** Of rising steps the one nearest to a place, by its row. */
function nearest(steps: readonly number[], place: number): number {
  const after = steps.findIndex((step) => step >= place);
  if (after <= 0) return after < 0 ? steps.length - 1 : 0;
  return place - steps[after - 1]! <= steps[after]! - place ? after - 1 : after;
}
