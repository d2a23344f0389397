/** Failed requests in words, for those who cannot see the marks. */
import { withUnit } from "./bytes";
import { counted } from "./numbers";

const TOLD = 3;

/** The first few requests, and how many there are besides. */
export function failedInWords(failed: readonly { bytes: number; at: string }[]): string {
  const told = failed.slice(0, TOLD).map((one) => ` A request of ${withUnit(one.bytes)} failed at ${one.at}.`);
  const more = failed.length - told.length;
  return told.join("") + (more > 0 ? ` ${counted(more, "more request")} failed.` : "");
}
