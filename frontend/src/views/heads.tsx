import type { ComponentChildren } from "preact";

/** The head of a column of numbers that is not sorted by. */
export function NumberHead({ title, children }: { title?: string; children: ComponentChildren }) {
  return (
    <th scope="col" class="number" title={title}>
      {children}
    </th>
  );
}

/** The head of a column that needs none for the eye. */
export function UnseenHead({ wide = false, children }: { wide?: boolean; children: ComponentChildren }) {
  return (
    <th scope="col" class={wide ? "wide" : undefined}>
      <span class="unseen">{children}</span>
    </th>
  );
}
