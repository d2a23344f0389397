import type { ComponentChildren } from "preact";

interface Props {
  of: string;
  class?: string;
  title?: string;
  "data-testid"?: string;
  children: ComponentChildren;
}

/** A term of a list, and what holds for it. */
export function Fact({ of, children, ...rest }: Props) {
  return (
    <>
      <dt>{of}</dt>
      <dd {...rest}>{children}</dd>
    </>
  );
}
