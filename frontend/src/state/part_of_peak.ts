import { stretch } from "./app";
import { asPartOf } from "./bytes";

/** A size in the unit of the peak that is on show, as in the sentences and tables around it. */
export function asPartOfPeak(bytes: number): string {
  return asPartOf(stretch.value!.peak.bytes, bytes);
}
