import { navigate } from "../state/app";
import type { Key } from "../state/route";
import { Segmented } from "./segmented";

interface Props<T extends string> {
  /** The address's key for it. */
  of: Key;
  label: string;
  testid: string;
  options: readonly (readonly [T, string])[];
  value: T;
  /** What stays out of the address. */
  usual?: T;
}

/** A choice of a few that the address keeps. */
export function RouteChoice<T extends string>({ of, usual, ...rest }: Props<T>) {
  return <Segmented {...rest} onPick={(to) => navigate({ [of]: to === usual ? undefined : to })} />;
}
