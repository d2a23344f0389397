/** Everything that can be picked, as a flat record that lives in the URL. */

export const VIEWS = [
  "overview",
  "timeline",
  "modules",
  "allocations",
  "stacks",
  "allocator",
  "compare",
  "ranks",
  "fleet",
  "advice",
] as const;
export type View = (typeof VIEWS)[number];

/** In the order in which a URL prints them. */
export const KEYS = [
  "run",
  "worker",
  "device",
  "step",
  "span", // timeline: step | window
  "base_run",
  "base_worker",
  "base_device", // only where it has another name than the picked one
  "base_step",
  "by", // timeline: category | module | phase
  "s0",
  "s1", // overview: zoom over the steps that a monitor saw; ranks: over all steps
  "t0",
  "t1",
  "t", // timeline: zoom and cursor, ns since the window's start
  "mark", // timeline: the event after which the cursor's moment is held against
  "find", // modules: filter
  "shape", // modules: tree | flat | icicle
  "inside", // modules: what the icicle is zoomed to
  "fold", // modules, compare, timeline: on | off
  "at", // modules: peak | highest
  "opened", // timeline, compare: folded modules that were opened, one a line
  "flipped", // modules: rows that were opened or closed
  "sort", // modules: column, with a leading "-" for ascending
  "what", // compare: module | category | operator | phase
  "changed", // compare: only what changed
  "curves", // compare: beside | over
  "reserve", // timeline: on | off, whether the picture is high enough for it
  "event", // allocator: the moment, as an event's index
  "over", // allocator: time | event
  "e0",
  "e1", // allocator: zoom over events
  "colour", // allocator, allocations: a division; spelled as in addresses that people have shared
  "order", // allocator: pool | size | free | address
  "scale", // allocator: how often the segments were magnified twofold
  "block", // allocator, allocations: row of the selected allocation
  "of", // stacks: moment | step
  "search", // stacks, allocations: a text in frames, names, addresses
  "frames", // stacks: folded | all | user
  "node", // stacks: the frame that the graph is zoomed to
  "table", // stacks: stacks | lines | rules
  "ranked", // stacks: order of the tables, with a leading "-" for ascending
  "rules", // stacks: lines of name=regex
  "listed", // allocations: order of the table
  "measure", // ranks: allocated | reserved | capacity
  "ordered", // ranks, fleet: order of the table, with a leading "-" turned round
  "filter", // fleet: a text in names of runs and ranks and in source lines
  "pattern", // fleet: on | off, whether that text is a regular expression
  "cause", // fleet: only runs with this cause
  "findings", // fleet: on | off, whether Advice judges the runs without a cause
  "hosts", // fleet: off, whether TensorBoard's own filter of runs counts
] as const;
export type Key = (typeof KEYS)[number];

export type Route = { view: View } & { [K in Key]?: string };
export type RoutePatch = { view?: View } & { [K in Key]?: string | undefined };

const LONGEST = 4096;

/** Reads `a=b&c=d`; keys that are not ours and values that are too long are left out. */
export function parseRoute(query: string): Route {
  const pairs: Record<string, string> = {};
  for (const piece of query.replace(/^[#?]/, "").split("&")) {
    const cut = piece.indexOf("=");
    if (cut > 0) pairs[decoded(piece.slice(0, cut))] = decoded(piece.slice(cut + 1));
  }
  return routeFrom(pairs);
}

export function routeFrom(pairs: Record<string, string>): Route {
  const view = VIEWS.find((v) => v === pairs["view"]) ?? "overview";
  const route: Route = { view };
  for (const key of KEYS) {
    const value = Object.hasOwn(pairs, key) ? pairs[key] : undefined;
    if (value !== undefined && value !== "" && value.length <= LONGEST) route[key] = value;
  }
  return route;
}

function routePairs(route: Route): [string, string][] {
  const pairs: [string, string][] = [["view", route.view]];
  for (const key of KEYS) {
    const value = route[key];
    if (value !== undefined) pairs.push([key, value]);
  }
  return pairs;
}

export function formatRoute(route: Route, prefix = ""): string {
  return routePairs(route)
    .map(([key, value]) => `${encodeURIComponent(prefix + key)}=${encodeURIComponent(value)}`)
    .join("&");
}

/** What belongs to the picked step alone and means nothing on another one. */
const OF_THE_STEP: readonly Key[] = ["t0", "t1", "t", "event", "e0", "e1", "block", "node", "span", "mark"];
/** Another tree has other nodes. */
const MAKES_THE_TREE: readonly Key[] = ["t", "event", "of", "frames"];
const PICKS: readonly Key[] = ["run", "worker", "device", "step"];

/** The route after a change; a new pick drops the zoom and the cursor but keeps the view. */
export function patched(route: Route, patch: RoutePatch): Route {
  const next: Record<string, string | undefined> = { ...route };
  if (PICKS.some((key) => key in patch && patch[key] !== route[key])) {
    for (const key of OF_THE_STEP) delete next[key];
  }
  if ("t" in patch) delete next["event"]; // another time is another event
  if (MAKES_THE_TREE.some((key) => key in patch && patch[key] !== route[key])) delete next["node"];
  for (const [key, value] of Object.entries(patch)) next[key] = value;
  return routeFrom(
    Object.fromEntries(Object.entries(next).filter(([, v]) => v !== undefined)) as Record<string, string>,
  );
}

/** "peak" is the usual way round, "-peak" the other; what names no order is the usual one. */
export function readOrder<T extends string>(text: string | undefined, orders: readonly T[], usual: T): { by: T; turned: boolean } {
  const by = orders.find((order) => order === text?.replace(/^-/, ""));
  return by ? { by, turned: text!.startsWith("-") } : { by: usual, turned: false };
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
