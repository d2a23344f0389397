import type { ComponentChildren } from "preact";
import { addressOf } from "../host/address";
import { navigate, route } from "../state/app";
import { patched, type RoutePatch } from "../state/route";

interface Props {
  to: RoutePatch;
  children: ComponentChildren;
  class?: string;
  title?: string;
  testid?: string;
}

/** A real link: a click stays in the frame, a middle click opens the shared address in a tab of its own. */
export function RouteLink({ to, children, title, testid, ...rest }: Props) {
  const follow = (event: MouseEvent): void => {
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.button !== 0) return;
    event.preventDefault();
    navigate(to);
  };
  return (
    <a
      class={rest.class}
      href={addressOf(patched(route.value, to))}
      target="_top"
      title={title}
      data-testid={testid}
      onClick={follow}
    >
      {children}
    </a>
  );
}
