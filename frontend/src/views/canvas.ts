/** A canvas as wide as its box: painted when its data, its width or the theme change; wheel and keys zoom it. */
import type { RefObject } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { panned, zoomed } from "../draw/stack";
import { watchWidth } from "../draw/surface";
import { dark } from "../host/theme";

interface Surface {
  box: RefObject<HTMLDivElement | null>;
  canvas: RefObject<HTMLCanvasElement | null>;
  width: number;
}

/** `box` is what the canvas fills; `onWidth` is told how wide that is. */
export function useSurface(onWidth?: (width: number) => void): Surface {
  const box = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const [width, setWidth] = useState(0);
  useEffect(() => watchWidth(box.current!, (now) => (setWidth(now), onWidth?.(now))), []);
  return { box, canvas, width };
}

/** Paints anew where one of `of` or the theme is another. */
export function usePaint(
  canvas: RefObject<HTMLCanvasElement | null>,
  paint: ((canvas: HTMLCanvasElement) => void) | false | undefined,
  of: unknown[],
): void {
  const theme = dark.value;
  useEffect(() => {
    if (canvas.current && paint) paint(canvas.current);
  }, [...of, theme]);
}

/** Wheel listeners must be able to keep the page from scrolling, so they are added by hand. */
export function useWheel(target: { current: HTMLElement | null }, callback: (event: WheelEvent) => void): void {
  const latest = useRef(callback);
  latest.current = callback;
  useEffect(() => {
    const element = target.current;
    const turn = (event: WheelEvent): void => (event.preventDefault(), latest.current(event));
    element?.addEventListener("wheel", turn, { passive: false });
    return () => element?.removeEventListener("wheel", turn);
  }, []);
}

/** Where a key leads: plus and minus nearer or further about a place, Shift and arrows along the axis; null for other keys. */
export function zoomedByKey(
  { key, shiftKey }: Pick<KeyboardEvent, "key" | "shiftKey">,
  window: readonly [number, number],
  whole: readonly [number, number],
  about: number,
  least?: number,
): [number, number] | null {
  if (key === "+" || key === "=") return zoomed(window, about, 0.5, whole, least);
  if (key === "-") return zoomed(window, about, 2, whole, least);
  if (shiftKey && key === "ArrowRight") return panned(window, 0.1, whole);
  return shiftKey && key === "ArrowLeft" ? panned(window, -0.1, whole) : null;
}
