/** The sentences that open each view, as pieces, so that names and numbers get their own look. */
import type { CompareAnswer, CompareRow, CompareSide, Part, Status, StepAnswer } from "../api/types";
import { asPartOf, changeWithUnit, deltaWithUnit, percent, type Unit, unitWithin, withUnit } from "./bytes";
import { counted, grouped } from "./numbers";
import { CATEGORIES, categoryLabel } from "./categories";
import { foldChanges, mainCategory } from "./change_folding";
import { foldParts } from "./folding";
import { capital, cellText, isModule, moduleInWords, moduleLabel, NOT_NAMED, placeName } from "./names";
import { runName } from "./run_name";

export type Piece = string | { strong: string; exact?: number } | { name: string; title?: string };

/**
 * "Step 5 peaked at 113.40 MiB in backward, in `blocks.3.mlp`." What is not known is left out; a step 0 that
 * is `alone` (as where no steps were marked) is called the recording.
 */
export function headline(answer: StepAnswer, alone = false): Piece[] {
  const { peak } = answer;
  const what = capital(stepName(answer.step, alone));
  const time = when(knownPhase(peak.phase, peak.by_phase));
  const place = placeName(peak.module, peak.operator);
  const size = { strong: withUnit(peak.bytes), exact: peak.bytes };
  const where: Piece[] = place === null ? [] : [time === "" ? " in " : ", in ", { name: place }];
  return [`${what} peaked at `, size, time, ...where, "."];
}

/** "step 5"; a step 0 that is `alone` is the recording. */
export function stepName(step: number, alone: boolean): string {
  return alone && step === 0 ? "the recording" : `step ${step}`;
}

const PHASES = ["forward", "backward", "optimizer"];

/** A moment's phase, null where nothing of what was alive then tells one: "other" then means not known. */
export function knownPhase(phase: string | null, alive: Part[]): string | null {
  return phase === "other" && !alive.some((part) => PHASES.includes(part.key)) ? null : phase;
}

function when(phase: string | null): string {
  if (phase === null || phase === "") return "";
  if (phase === "before") return " before the step began";
  if (phase === "other") return " outside forward, backward and optimizer";
  return phase === "optimizer" ? " in the optimizer's step" : ` in ${phase}`;
}

/** "0.31 GiB more than step 41, most of it in `loss`, as temporary memory." */
export function changeSince(answer: CompareAnswer, unit: Unit): Piece[] {
  const base = sideName(answer.base, answer.other);
  if (answer.delta_bytes === 0) return [...sameAs(base, answer)];
  const own = unitOfChange(answer, unit);
  const size = changeWithUnit(answer.delta_bytes, own);
  const direction = answer.delta_bytes > 0 ? "more" : "less";
  return [{ strong: size, exact: answer.delta_bytes }, ` ${direction} than ${base}. `, ...whereItIs(answer, own)];
}

/** "Step 42 peaks 0.31 GiB (1.7 %) above step 41." */
export function comparison(answer: CompareAnswer, unit: Unit): Piece[] {
  const other = capital(sideName(answer.other, answer.base));
  const base = sideName(answer.base, answer.other);
  if (answer.delta_bytes === 0)
    return [
      `${other} peaks at the same `,
      { strong: withUnit(answer.other.peak_bytes, unit), exact: answer.other.peak_bytes },
      ` as ${base}.`,
    ];
  const word = answer.delta_bytes > 0 ? "above" : "below";
  return [
    `${other} peaks `,
    { strong: changeWithUnit(answer.delta_bytes, unitOfChange(answer, unit)), exact: answer.delta_bytes },
    ` (${percent(Math.abs(answer.delta_bytes), answer.base.peak_bytes)}) ${word} ${base}.`,
  ];
}

/** "All of it in `loss`, as temporary memory. 6,769 allocations against 6,768." */
export function comparisonDetail(answer: CompareAnswer, unit: Unit): Piece[] {
  const counts = `${counted(answer.other.allocations, "allocation")} against ${grouped(answer.base.allocations)}.`;
  return [...(answer.delta_bytes === 0 ? sameDetail(answer) : whereItIs(answer, unitOfChange(answer, unit))), ` ${counts}`];
}

/** One unit for a change and its reasons: the page's, or a smaller one where even the largest is less than a tenth of it. */
export function unitOfChange({ delta_bytes, rows }: CompareAnswer, page: Unit): Unit {
  return unitWithin(page, rows.reduce((top, row) => Math.max(top, Math.abs(row.delta_bytes)), Math.abs(delta_bytes)));
}

function sameAs(base: string, answer: CompareAnswer): Piece[] {
  const changed = answer.rows.some((row) => row.delta_bytes !== 0);
  return [changed ? `The same total as ${base}, though parts of it moved.` : `The same as ${base}, to the byte.`];
}

function sameDetail(answer: CompareAnswer): Piece[] {
  const changed = answer.rows.filter((row) => row.delta_bytes !== 0).length;
  if (changed === 0) return ["No row differs by a byte."];
  return [`${counted(changed, "row differs", "rows differ")}, and the differences cancel.`];
}

/** Of more rows that changed, only as many are named. */
const NAMED = 4;

const BECAME: Record<Status, string> = { removed: "gone", shrunk: "smaller", added: "new", grown: "larger", same: "same" };
const [LESS, MORE] = [["removed", "shrunk"] as const, ["added", "grown"] as const];

/**
 * "Gone: `act` −24.00 MiB (activation). Smaller: `up` −24.00 MiB (activation). 3 others −0.02 MiB." What became of the
 * rows that changed most, first those that changed as the whole did. The amounts sum to the change.
 */
export function reasons(rows: CompareRow[], unit: Unit, label: (row: CompareRow) => string): Piece[] {
  const moved = rows.filter((row) => row.delta_bytes !== 0).sort((a, b) => Math.abs(b.delta_bytes) - Math.abs(a.delta_bytes));
  const named = moved.length === NAMED + 1 ? moved : moved.slice(0, NAMED);
  const others = moved.slice(named.length);
  const statuses = sum(moved) < 0 ? [...LESS, ...MORE] : [...MORE, ...LESS];
  const groups = statuses.map((status) => named.filter((row) => row.status === status)).filter((group) => group.length > 0);
  const rest = sum(others) === 0 ? "cancel" : deltaWithUnit(sum(others), unit);
  return [
    ...groups.flatMap((group, i) => [
      `${i === 0 ? "" : " "}${capital(BECAME[group[0]!.status])}: `,
      ...group.flatMap((row, at) => [at === 0 ? "" : ", ", ...amountOf(row, unit, label(row))]),
      ".",
    ]),
    others.length === 0 ? "" : ` ${counted(others.length, "other")} ${rest}.`,
  ];
}

function sum(rows: CompareRow[]): number {
  return rows.reduce((total, row) => total + row.delta_bytes, 0);
}

function amountOf(row: CompareRow, unit: Unit, name: string): Piece[] {
  const category = mainCategory(row);
  const kind = category === null || category === row.key ? "" : ` (${mostly(row)}${categoryLabel(category)})`;
  return [{ name }, ` ${deltaWithUnit(row.delta_bytes, unit)}${kind}`];
}

function partName({ key, label }: CompareRow): string {
  return (CATEGORIES as readonly string[]).includes(key) ? categoryLabel(key) : moduleInWords(moduleLabel(label));
}

/** Where the change is if it is all in one row, else what became of the rows. */
function whereItIs(answer: CompareAnswer, unit: Unit): Piece[] {
  const rows = foldChanges(answer.rows);
  const [top, ...others] = rows.filter((row) => row.delta_bytes !== 0);
  if (!top || others.length > 0) return reasons(rows, unit, partName);
  const became = top.status === "removed" || top.status === "added" ? `, which is ${BECAME[top.status]}` : "";
  return ["All of it ", ...placeOf(top.key, asCategory(top)), `${became}.`];
}

/** "At the peak of step 42, 4.91 GiB of 18.53 GiB (26.5 %) are in `blocks.*.mlp` itself." Of what the modules themselves hold. */
export function largestModule({ step, peak }: StepAnswer, alone: boolean): Piece[] | null {
  const top = foldParts(peak.by_module)[0];
  if (!top || top.key === NOT_NAMED) return null;
  const size = { strong: asPartOf(peak.bytes, top.bytes), exact: top.bytes };
  const share = `${withUnit(peak.bytes)} (${percent(top.bytes, peak.bytes)})`;
  return [`At the peak of ${stepName(step, alone)}, `, size, ` of ${share} are `, ...placeOf(top.key, ""), isModule(top.key) ? " itself." : "."];
}

/** "in `loss`, as temporary memory"; of what nobody named, the category alone. */
function placeOf(key: string, kind: string): Piece[] {
  if (kind === "" && (CATEGORIES as readonly string[]).includes(key)) return ["in ", { name: categoryLabel(key) }];
  if (key === NOT_NAMED && kind !== "") return [kind];
  const operator = isModule(key) ? null : placeName(key, null);
  const name = operator ?? moduleInWords(moduleLabel(key));
  return ["in ", { name }, operator === null ? "" : ", outside the modules", kind === "" ? "" : `, ${kind}`];
}

function asCategory(row: CompareRow): string {
  const category = mainCategory(row);
  if (category === null || category === row.key) return "";
  return mostly(row) + (category === "unknown" ? "of unknown category" : `as ${categoryLabel(category)} memory`);
}

function mostly(row: CompareRow): string {
  return row.category_delta_bytes === row.delta_bytes ? "" : "mostly ";
}

/** Whether the rows by module name any on this side. */
export function namesModules(rows: CompareRow[], side: "base_bytes" | "other_bytes"): boolean {
  return rows.some((row) => row[side] > 0 && isModule(row.key));
}

type Side = Omit<CompareSide, "peak_bytes" | "allocations">;

/** "step 41", with the worker or run where the two sides differ in it; "recording x" where no steps are told apart. */
export function sideName(side: Side, against: Omit<Side, "step">): string {
  const step = stepName(side.step, side.alone === true);
  if (side.run !== against.run && side.alone) return `recording ${cellText(runName(side.run))}`;
  if (side.run !== against.run) return `${step} of ${cellText(runName(side.run))}`;
  if (side.worker !== against.worker) return `${step} of ${cellText(side.worker)}`;
  return side.device === against.device ? step : `${step} on ${cellText(side.device)}`;
}

/** The sentence as plain text, for labels and tests. */
export function plain(pieces: Piece[]): string {
  return pieces.map((p) => (typeof p === "string" ? p : "strong" in p ? p.strong : p.name)).join("");
}
