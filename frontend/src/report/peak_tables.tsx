import { useState } from "preact/hooks";
import { exactBytes, inUnit, percent, unitFor, unitWithin } from "../state/bytes";
import { allocationName, NOT_NAMED, visible } from "../state/names";
import { grouped } from "../state/numbers";
import { duration } from "../state/time";
import { Category, Swatch } from "../views/category";
import { Fold } from "../views/fold";
import { Name } from "../views/name";
import { Tensor } from "../views/tensor";
import { PartName } from "./part_name";
import type { Device, Division, Largest } from "./recording";
import { Heads } from "../views/table";
import { BytesCell } from "../views/amount";

/** What the peak is made of: every part, and the largest single allocations. */
export function PeakTables({ device, division, timed }: { device: Device; division: Division; timed: boolean }) {
  return (
    <div class="report-tables">
      <Parts device={device} division={division} />
      <LargestAlive device={device} timed={timed} />
    </div>
  );
}

function Parts({ device, division }: { device: Device; division: Division }) {
  const [open, setOpen] = useState<string | null>(null);
  const unit = unitFor(device.peak.bytes);
  const [parts, bytes, count] = division.peak_rest;
  return (
    <section class="card" data-testid="peak-table">
      <h2>At the peak, by {division.label.toLowerCase()}</h2>
      <div class="scroller">
        <table class="plain">
          <Heads columns={[division.label, { number: unit.name }, { text: "%", look: "number few" }, { text: "blocks", look: "number few" }]} />
          <tbody>
            {division.peak.map(([key, size, blocks]) => (
              <tr key={key} data-testid="peak-row" data-key={key}>
                <th scope="row">
                  <span class="flexed">
                    <Swatch by={division.by} of={swatchOf(division, key)} index={division.keys.indexOf(key)} />
                    {division.by === "stack" && key.includes("\n") ? (
                      <Fold open={open === key} onFlip={() => setOpen(open === key ? null : key)}>
                        <PartName by="stack" name={key} />
                      </Fold>
                    ) : (
                      <PartName by={division.by} name={key} />
                    )}
                  </span>
                  {open === key && <pre class="frames mono">{key.split("\n").map(visible).join("\n")}</pre>}
                </th>
                <BytesCell bytes={size} unit={unit} />
                <td class="number few muted">{percent(size, device.peak.bytes).replace(" %", "")}</td>
                <td class="number few muted">{grouped(blocks)}</td>
              </tr>
            ))}
            {parts > 0 && (
              <tr data-testid="peak-rest">
                <th scope="row" class="muted">
                  {grouped(parts)} more
                </th>
                <BytesCell bytes={bytes} unit={unit} />
                <td class="number few muted">{percent(bytes, device.peak.bytes).replace(" %", "")}</td>
                <td class="number few muted">{grouped(count)}</td>
              </tr>
            )}
            <tr>
              <th scope="row" class="strong">
                total
              </th>
              <td class="number strong" title={exactBytes(device.peak.bytes)} data-testid="peak-total">
                {inUnit(device.peak.bytes, unit)}
              </td>
              <td class="number few" />
              <td class="number few muted">{grouped(division.peak.reduce((sum, part) => sum + part[2], count))}</td>
            </tr>
          </tbody>
        </table>
      </div>
    </section>
  );
}

function swatchOf(division: Division, key: string): string {
  return division.keys.includes(key) ? key : "(others)";
}

function LargestAlive({ device, timed }: { device: Device; timed: boolean }) {
  if (device.largest.length === 0) return null;
  const unit = unitWithin(unitFor(device.peak.bytes), device.largest[0]!.bytes);
  return (
    <section class="card" data-testid="largest">
      <h2>Largest alive at the peak</h2>
      <div class="scroller">
        <table class="plain">
          <Heads columns={[{ number: unit.name }, "what", "category", { number: "lives" }]} />
          <tbody>
            {device.largest.map((item, i) => (
              <tr key={i}>
                <BytesCell bytes={item.bytes} unit={unit} tone="strong" />
                <td class="cut">
                  <What item={item} />
                </td>
                <td class="cut">
                  <span class="flexed">
                    <Category of={item.category} />
                  </span>
                </td>
                <td class="number muted">{lifetime(item, timed)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

/** The best name that there is: its own, its module's, the line that made it. */
function What({ item }: { item: Largest }) {
  const name = allocationName({ ...item, operator: null });
  return (
    <span class="flexed">
      {name === null && item.line !== null ? (
        <PartName by="line" name={item.line} />
      ) : (
        <Name text={name ?? item.operator ?? item.address ?? NOT_NAMED} />
      )}
      <Tensor text={item.tensor} />
    </span>
  );
}

function lifetime(item: Largest, timed: boolean): string {
  if (item.born_ns === null) return item.freed_ns === null ? "throughout" : "until freed";
  if (item.freed_ns === null) return "to the end";
  return timed ? duration(item.freed_ns - item.born_ns) : "until freed";
}
