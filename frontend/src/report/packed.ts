/** Columns as tb_memplugin/exports/html.py packs them: byte planes of integers, deflated, in base64. */

export interface Packed {
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
