/** Names come from models, files and paths: shown as text, on one line, never longer than a row bears. */
import { HELD_BY_A_LOCAL } from "../api/contract";

const MARKS: Record<string, string> = { "\n": "⏎", "\r": "⏎", "\t": "⇥" };

/** Control characters as marks or escapes; characters that reorder or hide text as a replacement mark. */
export function visible(name: string): string {
  return name
    .replace(/[\u0000-\u001f\u007f]/g, (c) => MARKS[c] ?? `\\x${c.charCodeAt(0).toString(16).padStart(2, "0")}`)
    .replace(/[\u0080-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, "\ufffd");
}

/** Keeps the two ends, where names differ, and says with one mark that the middle is gone. */
export function shortened(name: string, longest: number): string {
  if (name.length <= longest) return name;
  const tail = Math.floor((longest - 1) / 2);
  return `${name.slice(0, longest - 1 - tail)}…${name.slice(name.length - tail)}`;
}

export function capital(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** What a cell prints: visible and at most 160 characters. */
export function cellText(name: string): string {
  return shortened(visible(name), 160);
}

/** What a title shows: visible and at most 2,000 characters. */
export function titleText(name: string): string {
  return shortened(visible(name), 2000);
}

const LONGEST_TAIL = 48;
const SHORTEST_HEAD = 5;

/** Where a cell may cut: the head gives way, the tail (the part that tells names apart) stays. */
export function headAndTail(text: string): [string, string] {
  if (text.length <= 14) return [text, ""];
  const from = Math.max(SHORTEST_HEAD, text.length - LONGEST_TAIL);
  const slash = text.lastIndexOf("/"); // of a path the file's name stays whole, with its line
  const dot = slash >= from ? slash : text.indexOf(".", from);
  const ends = dot > 0 && dot < text.length - 1;
  const cut = ends ? dot : text.length - Math.min(24, Math.floor(text.length / 2));
  return [text.slice(0, cut), text.slice(cut)];
}

/** The module of what was there before the window and has no known owner. */
export const NOT_NAMED = "(not named)";

const NO_OPERATOR = "(no operator)";
const OUTSIDE = "outside:";

/** Where something happened: its module, else the operator that no module owns; null where neither is known. */
export function placeName(module: string | null, operator: string | null): string | null {
  const owned = module !== null && module !== "" && module !== NOT_NAMED;
  if (owned && !module.startsWith(OUTSIDE)) return moduleInWords(module);
  const name = operator ?? (owned ? module.slice(OUTSIDE.length) : "");
  return name === "" || name === NO_OPERATOR ? null : name;
}

/** A module in a sentence: that of a Sequential is a number, which alone would look like an amount. */
export function moduleInWords(name: string): string {
  return /^[\d.*]+$/.test(name) ? `module ${name}` : name;
}

/** What an allocation goes by: its own name, unless that only says that nobody known holds it; else its module, its operator, or null. */
export function allocationName(a: { name: string | null; module: string | null; operator: string | null }): string | null {
  const module = a.module === null || a.module === NOT_NAMED ? null : moduleLabel(a.module);
  const name = a.name === HELD_BY_A_LOCAL ? null : a.name;
  return (name ?? module ?? a.operator ?? a.name) || null;
}

/** Whether a key is a module's: not an operator that no module owns, and not what nobody named. */
export function isModule(key: string): boolean {
  return !key.startsWith(OUTSIDE) && key !== NOT_NAMED;
}

/** A module key in words: the root's own, what no module owns, what was there before. */
export function moduleLabel(key: string): string {
  if (key === "") return "(root)";
  if (key.startsWith(OUTSIDE)) return `outside · ${key.slice(OUTSIDE.length) || "no operator"}`;
  return key;
}
