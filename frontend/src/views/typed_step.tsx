import { grouped } from "../state/numbers";

/** Longer lists of steps are no help: opening one of 20,000 takes a browser five seconds. */
export const MOST_LISTED = 300;

interface Props {
  testid: string;
  id?: string;
  step: number;
  first: number;
  last: number;
  /** Offered while one types, where they are few. */
  offered: number[];
  /** What a typed number between first and last means. */
  found?: (typed: number) => number;
  onPick: (step: number) => void;
}

/** Of very many steps nobody picks from a list: the number is typed. */
export function TypedStep({ testid, id, step, first, last, offered, found = (typed) => typed, onPick }: Props) {
  const listed = offered.length > 0 && offered.length <= MOST_LISTED;
  return (
    <>
      <input
        id={id}
        type="number"
        data-testid={testid}
        min={first}
        max={last}
        list={listed ? `${testid}-list` : undefined}
        title={`${grouped(first)} to ${grouped(last)}`}
        value={step}
        onChange={(event) => {
          const typed = Number(event.currentTarget.value);
          const known = event.currentTarget.value !== "" && Number.isInteger(typed) && typed >= first && typed <= last;
          const next = known ? found(typed) : step;
          event.currentTarget.value = String(next);
          if (next !== step) onPick(next);
        }}
      />
      {listed && (
        <datalist id={`${testid}-list`}>
          {offered.map((one) => (
            <option key={one} value={one} />
          ))}
        </datalist>
      )}
    </>
  );
}

/** Of rising steps the nearest to a number; of two equally near the lower. */
export function nearestStep(steps: readonly number[], typed: number): number {
  let after = steps.findIndex((step) => step >= typed);
  if (after < 0) after = steps.length - 1;
  const [below, above] = [steps[Math.max(0, after - 1)]!, steps[after]!];
  return typed - below <= above - typed ? below : above;
}
