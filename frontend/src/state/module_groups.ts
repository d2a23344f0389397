/** Groups of modules on the Timeline, those that were opened as lines of the address: `layers.*.mlp`, `layers.0-15.mlp`. */

/** As many as the server takes. */
const MOST_OPENED = 20;

export function openedGroups(text: string | undefined): string[] {
  return text === undefined ? [] : text.split("\n").filter((key) => key !== "");
}

/** The address's text with one more opened; undefined where none is. */
export function withOpened(text: string | undefined, key: string): string | undefined {
  return joined([...openedGroups(text), key].slice(-MOST_OPENED));
}

/** The same with one closed, and all that was opened inside it. */
export function withClosed(text: string | undefined, key: string): string | undefined {
  const opened = openedGroups(text);
  return joined(opened.filter((one, at) => at < opened.indexOf(key) || !isWithin(one, key)));
}

function joined(opened: string[]): string | undefined {
  return opened.length > 0 ? opened.join("\n") : undefined;
}

/** One row more opened, or closed where it was open: rows that stand beside one another, not inside. */
export function withFlipped(text: string | undefined, key: string): string | undefined {
  const opened = openedGroups(text);
  return opened.includes(key) ? joined(opened.filter((one) => one !== key)) : withOpened(text, key);
}

/** Whether every module of the one group is one of the other. */
export function isWithin(inner: string, outer: string): boolean {
  const [a, b] = [inner.split("."), outer.split(".")];
  return a.length >= b.length && b.every((segment, at) => segment === a[at] || covers(segment, a[at]!));
}

function covers(outer: string, inner: string): boolean {
  const [from, to] = range(inner);
  if (outer === "*") return from <= to;
  const [first, last] = range(outer);
  return first <= from && to <= last && from <= to;
}

/** 16-31, or 7 as 7 to 7; what is no number covers nothing and is covered by nothing. */
function range(segment: string): [number, number] {
  const found = /^(\d+)(?:-(\d+))?$/.exec(segment);
  return found ? [Number(found[1]), Number(found[2] ?? found[1])] : [Infinity, -Infinity];
}
