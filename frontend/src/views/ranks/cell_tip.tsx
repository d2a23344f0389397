import type { RanksAnswer } from "../../api/types";
import { deltaWithUnit, exactBytes, percent, unitFor, withUnit } from "../../state/bytes";
import { cellText } from "../../state/names";
import { grouped } from "../../state/numbers";
import { type Cell, type CellFigures, figuresOf, nounOf, oneStep } from "../../state/ranks";
import { Tip } from "../tip";

interface Props {
  answer: RanksAnswer;
  cell: Cell;
  x: number;
  y: number;
}

/** What one cell is: whose, when, exactly how many bytes, and how far from the median rank. */
export function CellTip({ answer, cell, x, y }: Props) {
  const figures = figuresOf(answer, cell);
  const { rank, bytes, first, last } = figures;
  const noun = nounOf(answer.rows);
  return (
    <Tip x={x} y={y} testid="ranks-tip">
      <div>
        <b class="mono">{cellText(rank.worker)}</b> {cellText(rank.device)}
        {!oneStep(answer.rows) && ` · ${columnWords(first, last)}`}
      </div>
      {bytes === null ? (
        <div>{first === last ? "Not recorded" : "None of them recorded"} on this {noun}.</div>
      ) : (
        <>
          <div class="tip-bytes">
            <strong>{withUnit(bytes)}</strong> · {exactBytes(bytes)}
          </div>
          {first !== last && <div>the highest of them, in step {figures.step}</div>}
          <div>{overMedian(figures, noun)}</div>
          {rank.capacity_bytes !== null && (
            <div>
              {percent(bytes, rank.capacity_bytes)} of {withUnit(rank.capacity_bytes)}
            </div>
          )}
        </>
      )}
    </Tip>
  );
}

function columnWords(first: number, last: number): string {
  return first === last ? `step ${first}` : `steps ${first} to ${last}`;
}

/** Against the ranks or devices of the same column. */
export function overMedian({ bytes, median, ranks }: CellFigures, noun: "rank" | "device"): string {
  if (bytes === null || median === null) return `no other ${noun} has it`;
  const of = `the median of ${grouped(ranks)} ${noun}s`;
  if (bytes === median) return `as much as ${of}`;
  return `${deltaWithUnit(bytes - median, unitFor(bytes, median))} against ${of} (${exactBytes(bytes - median)})`;
}
