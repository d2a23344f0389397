import type { ComponentChildren } from "preact";

interface Props {
  open: boolean;
  onFlip: () => void;
  style?: { paddingLeft: string } | undefined;
  title?: string;
  testid?: string;
  children: ComponentChildren;
}

/** A row's name as a button that opens and closes what is inside the row. */
export function Fold({ open, onFlip, style, title, testid, children }: Props) {
  return (
    <button type="button" class="fold" style={style} title={title} data-testid={testid} aria-expanded={open} onClick={onFlip}>
      <span class="caret" aria-hidden="true">
        {open ? "▾" : "▸"}
      </span>
      {children}
    </button>
  );
}
