import type { ComponentChildren } from "preact";

/** What a line, a swatch or a mark in a picture stands for; `look` is its class in the stylesheet. */
export function KeyEntry({ look, title, children }: { look: string; title?: string; children: ComponentChildren }) {
  return (
    <span class="key" title={title}>
      <span class={look} />
      {children}
    </span>
  );
}
