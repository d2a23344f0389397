/** A button and the small panel that it opens: one behavior for all of them. */
import type { RefObject } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

export interface Panel {
  open: boolean;
  flip: () => void;
  /** Closes it and leaves the keyboard at its button. */
  close: () => void;
  box: RefObject<HTMLDivElement | null>;
  button: RefObject<HTMLButtonElement | null>;
}

/** Esc closes it, and so does a click or the keyboard's focus anywhere else, and a change of `place`. `box` is around both. */
export function usePanel(place?: string): Panel {
  const [open, setOpen] = useState(false);
  const box = useRef<HTMLDivElement>(null);
  const button = useRef<HTMLButtonElement>(null);
  const close = (): void => (setOpen(false), button.current?.focus());
  useEffect(() => setOpen(false), [place]);
  useEffect(() => {
    if (!open) return;
    const outside = (event: Event): void => void (!box.current?.contains(event.target as Node) && setOpen(false));
    const escape = (event: KeyboardEvent): void => void (event.key === "Escape" && close());
    document.addEventListener("pointerdown", outside);
    document.addEventListener("focusin", outside);
    document.addEventListener("keydown", escape);
    return () => {
      document.removeEventListener("pointerdown", outside);
      document.removeEventListener("focusin", outside);
      document.removeEventListener("keydown", escape);
    };
  }, [open]);
  return { open, flip: () => setOpen(!open), close, box, button };
}

/** How far a panel that just opened must move sideways to stay in the window; its first control gets the keyboard. */
export function useOpened(first: string): { panel: RefObject<HTMLDivElement | null>; shift: number } {
  const panel = useRef<HTMLDivElement>(null);
  const [shift, setShift] = useState(0);
  useLayoutEffect(() => {
    const { left, right } = panel.current!.getBoundingClientRect();
    setShift(Math.max(8 - left, Math.min(0, document.documentElement.clientWidth - 8 - right)));
    panel.current!.querySelector<HTMLElement>(first)?.focus();
  }, []);
  return { panel, shift };
}
