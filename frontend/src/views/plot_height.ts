/** How high a chart is: what the window has left below the pickers, within bounds. */
import { useEffect, useState } from "preact/hooks";

/** `others`: CSS pixels that everything above and below the plot takes. */
export function usePlotHeight(others: number, least: number, most: number): number {
  const fitting = (): number => Math.round(Math.min(most, Math.max(least, window.innerHeight - others)));
  const [height, setHeight] = useState(fitting);
  useEffect(() => {
    const resized = (): void => void (window.innerHeight > 0 && setHeight(fitting()));
    window.addEventListener("resize", resized);
    return () => window.removeEventListener("resize", resized);
  }, []);
  return height;
}
