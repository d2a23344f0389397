/** What the page was given, unpacked: every allocation and free of each device, in time order. */
import type { Allocation, Finding, LanesAnswer } from "../api/types";

export interface ReportData {
  version: number;
  title: string;
  source: string;
  epoch_ns: string;
  timed: boolean;
  /** The events drawn: from the first to before `events`. */
  first_event: number;
  events: number;
  devices: DeviceData[];
  notes: string[];
  properties: Record<string, string>;
}

interface DeviceData {
  name: string;
  capacity: number | null;
  product: string;
  time: Packed;
  event: Packed;
  change: Packed;
  reserved: { start_bytes: number; time: Packed; event: Packed; bytes: Packed } | null;
  start_bytes: number;
  end_bytes: number;
  peak: Peak;
  lanes: LanesAnswer | null;
  divisions: DivisionData[];
  largest: Largest[];
  advice: { heading: string; findings: BriefFinding[] };
  failed: [event: number, time_ns: number, bytes: number][];
}

interface DivisionData {
  by: string;
  label: string;
  keys: string[];
  start: number[];
  code: Packed;
  peak: [key: string, bytes: number, count: number][];
  peak_rest: [parts: number, bytes: number, count: number];
}

export interface Peak {
  event: number;
  time_ns: number;
  bytes: number;
}

/** A finding without evidence: nothing on this page leads to it. */
type BriefFinding = Omit<Finding, "evidence" | "levels" | "where">;

export type Largest = Omit<Allocation, "address"> & { address: string | null; line: string | null };

/** One way to divide: `code[i]` is the key of change i, `start` the bytes of each key before all changes. */
export interface Division extends Omit<DivisionData, "code"> {
  code: Float64Array;
}

/** A value that changes at places on the axes; `start` holds before the first. */
export interface Steps {
  start: number;
  time: Float64Array;
  event: Float64Array;
  bytes: Float64Array;
}

export interface Device extends Omit<DeviceData, "time" | "event" | "change" | "reserved" | "divisions"> {
  time: Float64Array;
  event: Float64Array;
  change: Float64Array;
  reserved: Steps | null;
  divisions: Division[];
}

export async function openDevice(data: DeviceData): Promise<Device> {
  const { reserved } = data;
  return {
    ...data,
    time: await unpackSteps(data.time),
    event: await unpackSteps(data.event),
    change: await unpack(data.change),
    reserved: reserved && {
      start: reserved.start_bytes,
      time: await unpackSteps(reserved.time),
      event: await unpackSteps(reserved.event),
      bytes: await unpackSteps(reserved.bytes),
    },
    divisions: await Promise.all(data.divisions.map(async (d) => ({ ...d, code: await unpack(d.code) }))),
  };
}

export type AxisName = "time" | "event";

/** The whole of an axis: every change lies within it, and the span is never empty. */
export function wholeOf(data: ReportData, device: Device, axis: AxisName): [number, number] {
  if (axis === "event") return [data.first_event, Math.max(data.first_event + 1, data.events)];
  const { lanes } = device;
  const first = Math.min(device.time[0] ?? 0, lanes?.t0 ?? Infinity, device.reserved?.time[0] ?? Infinity);
  const last = Math.max(device.time.at(-1) ?? 0, lanes?.t1 ?? 0, device.reserved?.time.at(-1) ?? 0);
  return [first, Math.max(last, first + 1)];
}

/** Columns as tb_memplugin/exports/html.py packs them: byte planes of integers, deflated, in base64. */

interface Packed {
  count: number;
  width: number;
  data: string;
}

/** The integers, exact up to 2^53. */
export async function unpack(column: Packed): Promise<Float64Array> {
  const planes = await inflated(column.data);
  const { count, width } = column;
  const values = new Float64Array(count);
  for (let plane = 0; plane < width; plane++) {
    const weight = 256 ** plane;
    const last = plane === width - 1; // its highest bit is the sign
    const from = plane * count;
    for (let i = 0; i < count; i++) {
      const byte = planes[from + i]!;
      values[i]! += weight * (last && byte > 127 ? byte - 256 : byte);
    }
  }
  return values;
}

/** Differences, summed up again. */
export async function unpackSteps(column: Packed): Promise<Float64Array> {
  const values = await unpack(column);
  for (let i = 1; i < values.length; i++) values[i]! += values[i - 1]!;
  return values;
}

async function inflated(data: string): Promise<Uint8Array> {
  const packed = Uint8Array.from(atob(data), (sign) => sign.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
