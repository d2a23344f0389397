import { deltaInUnit, deltaWithUnit, exactBytes, inUnit, type Unit, unitFor, unitWithin, withUnit } from "../state/bytes";

interface Props {
  bytes: number;
  unit: Unit;
  /** Prints the unit; tables name it once instead. */
  named?: boolean;
}

export function Bytes({ bytes, unit, named = false }: Props) {
  return (
    <span class="amount" title={exactBytes(bytes)}>
      {named ? withUnit(bytes, unit) : inUnit(bytes, unit)}
    </span>
  );
}

/** A cell of bytes in the unit that the table names. */
export function BytesCell({ bytes, unit, tone }: { bytes: number; unit: Unit; tone?: "strong" | "muted" | undefined }) {
  return (
    <td class={tone ? `number ${tone}` : "number"} title={exactBytes(bytes)}>
      {inUnit(bytes, unit)}
    </td>
  );
}

/** What is no part of a whole that its table shows: in its own unit, whose room is the same in each row. */
export function InOwnUnit({ bytes }: { bytes: number }) {
  const unit = unitFor(bytes);
  return (
    <>
      {inUnit(bytes, unit)} <span class="unit">{unit.name}</span>
    </>
  );
}

/** A change: warm where it grew, green where it shrank, a dash where it is the same. */
export function Delta({ bytes, unit, named = false }: Props) {
  const tone = bytes > 0 ? "grown" : bytes < 0 ? "shrunk" : "same";
  const text = bytes === 0 ? "–" : named ? deltaWithUnit(bytes, unitWithin(unit, Math.abs(bytes))) : deltaInUnit(bytes, unit);
  return (
    <span class={`amount ${tone}`} title={exactBytes(bytes)}>
      {text}
    </span>
  );
}
