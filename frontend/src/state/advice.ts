/** What the Advice view says, and where its links lead. */
import { RULES } from "../api/contract";
import type { AdviceAnswer, Finding, Verdict, Where } from "../api/types";
import { lineParts } from "./frames";
import { moduleLabel } from "./names";
import { counted, grouped } from "./numbers";
import { KEYS, type RoutePatch, VIEWS } from "./route";
import { type Piece, stepName } from "./sentences";

export function ruleName(kind: string): string {
  return RULES[kind]?.name ?? kind.replaceAll("_", " ");
}

/** "1 problem to fix and 2 options that have a price, in steps 2 to 5." */
export function adviceHeadline(answer: AdviceAnswer, alone = false): Piece[] {
  const problems = answer.findings.filter((f) => f.level === "problem").length;
  const options = answer.findings.length - problems;
  const watched = answer.watched_steps;
  const judged = watched > 0 ? counted(watched, "watched step") : stepsOf(answer.steps);
  const where = ` in ${alone ? stepName(answer.steps[0] ?? 0, true) : judged}.`;
  const price = `${options === 1 ? "option that has" : "options that have"} a price`;
  const rules = (verdict: Verdict): number => answer.judgements.filter((one) => one.verdict === verdict).length;
  const few = watched > 0 ? rules("fine") === 0 : rules("not judged") > rules("fine");
  if (problems === 0 && options === 0 && few) return ["The recording lacks what most rules need."];
  const nothing = rules("not judged") === 0 ? "Nothing to fix" : "No problem found";
  if (problems === 0 && options === 0) return [nothing, where];
  if (problems === 0) return [nothing, ", and ", { strong: grouped(options) }, ` ${price},`, where];
  const fix: Piece[] = [{ strong: grouped(problems) }, ` ${problems === 1 ? "problem" : "problems"} to fix`];
  return options === 0 ? [...fix, where] : [...fix, " and ", { strong: grouped(options) }, ` ${price},`, where];
}

/** "step 5", "steps 2 to 5", "steps 2, 4 and 9". */
export function stepsOf(steps: readonly number[]): string {
  const [first, last] = [steps[0], steps[steps.length - 1]];
  if (first === undefined || last === undefined) return "this recording";
  if (steps.length === 1) return `step ${first}`;
  if (last - first === steps.length - 1) return `steps ${first} ${steps.length === 2 ? "and" : "to"} ${last}`;
  if (steps.length > 6) return `${grouped(steps.length)} steps from ${first} to ${last}`;
  return `steps ${steps.slice(0, -1).join(", ")} and ${last}`;
}

/** A finding's sentence; its name, where it has one, is a name and no part of our words. */
export function titleOf(finding: Pick<Finding, "title" | "subject">): Piece[] {
  const at = finding.subject === "" ? -1 : finding.title.indexOf(finding.subject);
  if (at < 0) return [finding.title];
  const after = finding.title.slice(at + finding.subject.length);
  const { place, name, folder } = lineParts(finding.subject);
  const chip = folder === "" ? { name: moduleLabel(finding.subject) } : { name: `${place} (${name})`, title: finding.subject };
  return [finding.title.slice(0, at), chip, after].filter((piece) => piece !== "");
}

/** What a view of its own shows must not linger from the view that was left. */
const FRESH = ["t0", "t1", "t", "event", "e0", "e1", "over", "block", "find", "search", "of", "node", "sort", "listed", "at"] as const;

/** The route that a link leads to; null where this version has no such view. */
export function linkTo(where: Where): RoutePatch | null {
  const view = VIEWS.find((v) => v === where.view);
  if (!view) return null;
  const patch: RoutePatch = { view };
  for (const key of FRESH) patch[key] = undefined;
  for (const key of KEYS) {
    const value = Object.hasOwn(where.state, key) ? where.state[key] : undefined;
    if (value !== undefined) patch[key] = value;
  }
  return patch;
}

const ORDER: readonly Verdict[] = ["fine", "not judged"];

/** What the rules without a finding came to: what is fine first, then what could not be judged. */
export function unfound(answer: AdviceAnswer): AdviceAnswer["judgements"] {
  return ORDER.flatMap((verdict) => answer.judgements.filter((one) => one.verdict === verdict));
}
