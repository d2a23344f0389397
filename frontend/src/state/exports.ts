/** What the window in sight can be written as, and the console's command for what a view shows. */
import { DIVISIONS } from "../api/contract";
import type { Route } from "./route";

export interface Shown {
  route: Route;
  /** TensorBoard's; empty where it tells none. */
  logdir: string;
  /** The window's file, within the logdir. */
  sideFile: string;
  device: string;
  /** Null: all steps of the window as one. */
  step: number | null;
}

/** The command that tells on the console what a view tells; null where none does, or where it could not be pasted. */
export function commandOf({ route, logdir, sideFile, device, step }: Shown): string | null {
  if (logdir === "") return null;
  const at = step === null ? [] : ["--step", String(step)];
  const rest = COMMANDS[route.view]?.(route, at);
  if (!rest) return null;
  const [name, ...options] = rest;
  const words = [name!, `${logdir.replace(/\/+$/, "")}/${sideFile}`, ...options, "--device", device];
  return words.some(hasControls) ? null : ["tb-memplugin", ...words.map(quoted)].join(" ");
}

type Command = (route: Route, at: string[]) => string[];

const COMMANDS: Partial<Record<Route["view"], Command>> = {
  overview: (_, at) => ["peak", ...at],
  timeline: ({ by }, at) => ["peak", ...at, "--by", DIVISIONS.find((one) => one === by) ?? "category"],
  modules: (_, at) => ["peak", ...at, "--by", "module"],
  stacks: (_, at) => ["peak", ...at, "--by", "line"],
  allocator: () => ["allocator"],
  advice: () => ["advice"],
};

/** A terminal acts on these as they are pasted, quotes or not. */
function hasControls(word: string): boolean {
  return /[\u0000-\u001f\u007f-\u009f]/.test(word);
}

/** A word as a POSIX shell reads it. */
function quoted(word: string): string {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}
