/** Which rows of a long table are in sight; every row is equally high, so no measuring. */
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { useRowKeys } from "./row_keys";

export interface InSight {
  first: number;
  last: number;
  above: number;
  below: number;
}

const OVERSCAN = 8;

/** A key that rows leaving at one end hand to rows entering at the other, so that scrolling reuses them. */
export function reusedKey(index: number, { first, last }: InSight): number {
  return index % Math.max(1, last - first);
}

/** Rows to render for a scroll position: [first, last), with the heights that stand for the others. */
export function rowsInSight(count: number, rowHeight: number, scrollTop: number, height: number): InSight {
  const first = Math.min(count, Math.max(0, Math.floor(scrollTop / rowHeight) - OVERSCAN));
  const last = Math.min(count, Math.ceil((scrollTop + height) / rowHeight) + OVERSCAN);
  return {
    first,
    last: Math.max(first, last),
    above: first * rowHeight,
    below: Math.max(0, count - Math.max(first, last)) * rowHeight,
  };
}

export function useRowsInSight(count: number, rowHeight: number) {
  const box = useRef<HTMLDivElement>(null);
  const [place, setPlace] = useState({ top: 0, height: 900 });
  useEffect(() => {
    const element = box.current;
    if (!element) return;
    const read = (): void => {
      const { scrollTop, clientHeight } = element;
      // Rounded to rows, so that scrolling by a few pixels renders nothing anew.
      const next = { top: Math.floor(scrollTop / rowHeight / 4) * rowHeight * 4, height: Math.max(200, clientHeight) };
      setPlace((old) => (old.top === next.top && old.height === next.height ? old : next));
    };
    const observer = new ResizeObserver(read);
    observer.observe(element);
    element.addEventListener("scroll", read, { passive: true });
    return () => (observer.disconnect(), element.removeEventListener("scroll", read));
  }, [rowHeight]);
  return { box, sight: rowsInSight(count, rowHeight, place.top, place.height) };
}

/** A table's body: the rows in sight, and space for the others. */
export function RowsInSight({ sight, columns, children }: { sight: InSight; columns: number; children: ComponentChildren }) {
  return (
    <tbody {...useRowKeys()}>
      <Spacer height={sight.above} columns={columns} />
      {children}
      <Spacer height={sight.below} columns={columns} />
    </tbody>
  );
}

/** A row as high as those that are out of sight. */
function Spacer({ height, columns }: { height: number; columns: number }) {
  if (height === 0) return null;
  return (
    <tr class="spacer" aria-hidden="true">
      <td colSpan={columns} style={{ height: `${height}px` }} />
    </tr>
  );
}
