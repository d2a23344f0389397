/** Keeps the keyboard where it was when a group of modules opens or folds: its row is then another one. */
import { useEffect, useRef } from "preact/hooks";
import { isWithin } from "../../state/module_groups";

type Wanted = { opened: string } | { closed: string };

/** By then the groups are there, or the keyboard is somewhere else. */
const LONGEST_WAIT = 5000;

let wanted: Wanted | null = null;
let until = 0;

/** The row to focus as soon as the groups are there. */
export function wantFocus(of: Wanted): void {
  wanted = of;
  until = performance.now() + LONGEST_WAIT;
}

/** For the body of the table that has the groups as rows; `ready` once these are the new ones. */
export function useGroupFocus(ready: boolean) {
  const body = useRef<HTMLTableSectionElement>(null);
  useEffect(() => {
    if (!wanted || !ready || !body.current) return;
    const rows = [...body.current.querySelectorAll<HTMLElement>("tr[data-key]")];
    const row = rows.find(({ dataset: { key = "" } }) => isMeant(key, wanted!));
    if (!row && performance.now() < until) return; // the curve, which orders the rows, comes after the moment
    wanted = null;
    const now = document.activeElement;
    if (now === document.body || body.current.contains(now)) (row?.querySelector("button") ?? row?.querySelector("th"))?.focus();
  });
  return body;
}

function isMeant(key: string, of: Wanted): boolean {
  return "opened" in of ? isWithin(key, of.opened) : key === of.closed;
}
