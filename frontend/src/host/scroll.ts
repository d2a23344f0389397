/** Where a place was scrolled to, so that Back returns to what was read there, not to the page's beginning. */

const MOST_PLACES = 50;
const LONGEST_WAIT = 1500;

const places = new Map<string, number>();
let returning: string | null = null;

/** Called as a place is left, by a click or by Back. */
export function leave(place: string): void {
  returning = null;
  places.delete(place);
  places.set(place, window.scrollY);
  if (places.size > MOST_PLACES) places.delete(places.keys().next().value!);
}

/** Called as Back or Forward leads to a place, before it is drawn. */
export function comeBack(place: string): void {
  returning = place;
}

/** Called once a view is drawn: scrolls to where it was left, else to its top. Returns how to stop. */
export function arrive(): () => void {
  const wanted = returning === null ? 0 : (places.get(returning) ?? 0);
  returning = null;
  const until = performance.now() + LONGEST_WAIT;
  let frame = 0;
  const stop = (): void => cancelAnimationFrame(frame);
  const reach = (): void => {
    window.scrollTo(0, wanted);
    // What is to be there may still be loading: the page is not high enough yet.
    if (window.scrollY < wanted - 1 && performance.now() < until) frame = requestAnimationFrame(reach);
  };
  reach();
  for (const meant of ["wheel", "keydown", "pointerdown"]) window.addEventListener(meant, stop, { once: true });
  return stop;
}
