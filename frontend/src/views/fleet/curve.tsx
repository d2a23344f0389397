import type { FleetRun } from "../../api/types";
import { counted } from "../../state/numbers";

const WIDTH = 120;
const HEIGHT = 22;
const FULL = 1000;

/** The peaks of a run's steps, from 0 to the highest, which is marked. The numbers are in the columns beside it. */
export function Curve({ row: { curve, first, last, steps } }: { row: FleetRun }) {
  const wide = WIDTH / curve.length;
  const y = (value: number): number => HEIGHT - ((HEIGHT - 3) * value) / FULL;
  const top = curve.indexOf(FULL);
  const outline = curve.map((value, i) => `H${(i * wide).toFixed(1)}V${y(value).toFixed(1)}H${((i + 1) * wide).toFixed(1)}`);
  return (
    <svg class="spark" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} width={WIDTH} height={HEIGHT} aria-hidden="true" data-testid="spark">
      <title>{first === last ? `step ${first}` : `${counted(steps, "step")}, ${first} to ${last}`}</title>
      <path class="spark-area" d={`M0 ${HEIGHT}${outline.join("")}V${HEIGHT}Z`} />
      <circle class="spark-peak" cx={Math.min(WIDTH - 2.5, Math.max(2.5, (top + 0.5) * wide))} cy={y(FULL)} r="2.5" />
    </svg>
  );
}
