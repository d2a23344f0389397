import { useEffect, useState } from "preact/hooks";
import { FORMATS } from "../api/contract";
import { useRemote } from "../api/remote";
import { address, type Failure, failureOf, request } from "../api/request";
import type { ExportAbout, StepAnswer } from "../api/types";
import { picked, route, runs, selection, stretch } from "../state/app";
import { exactBytes, withUnit } from "../state/bytes";
import { commandOf } from "../state/exports";
import { shortened, titleText, visible } from "../state/names";
import type { Selection } from "../state/selection";
import { CopyButton } from "./copy_button";
import { useOpened, usePanel } from "./panel";

type Format = (typeof FORMATS)[number];

/** How far the last export is. */
type Job =
  | { is: "writing"; format: Format }
  | { is: "written"; about: ExportAbout }
  | { is: "failed"; format: Format; failure: Failure };

/** Right of the pickers: the window that is looked at, as a file that other programs read. */
export function ExportMenu() {
  const { open, flip, box, button } = usePanel(JSON.stringify(route.value));
  const [job, setJob] = useState<Job | null>(null);
  const pick = picked.value!;
  const window = JSON.stringify(pick);
  useEffect(() => setJob((now) => (now?.is === "writing" ? now : null)), [window]);
  const write = (format: Format): void => {
    setJob({ is: "writing", format });
    written(format.id, pick).then(
      (about) => setJob({ is: "written", about }),
      (error: unknown) => setJob({ is: "failed", format, failure: failureOf(error, "export") }),
    );
  };
  return (
    <div class="picker export" ref={box}>
      <button
        type="button"
        ref={button}
        class="boxed"
        data-testid="export"
        aria-expanded={open}
        aria-haspopup="dialog"
        aria-busy={job?.is === "writing"}
        onClick={flip}
      >
        {job?.is === "writing" ? "Exporting …" : job?.is === "failed" ? "Export failed" : "Export"}
      </button>
      {open && <ExportPanel s={selection.value!} job={job} onWrite={write} />}
    </div>
  );
}

/** Has the server write the file, which may fail in words; then the browser saves it, however large it is. */
async function written(to: string, pick: object): Promise<ExportAbout> {
  const query = { ...pick, to };
  const about = await request<ExportAbout>(address("export_about", query));
  const link = document.createElement("a");
  link.href = address("export", query);
  link.download = about.name;
  link.click();
  return about;
}

interface Props {
  s: Selection;
  job: Job | null;
  onWrite: (format: Format) => void;
}

function ExportPanel({ s, job, onWrite }: Props) {
  const { panel, shift } = useOpened("button:enabled");
  const step = useRemote<StepAnswer>(s.stats ? address("step", picked.value!) : null);
  const why = reason(s, step.data);
  const busy = job?.is === "writing";
  return (
    <div
      ref={panel}
      class="panel export-panel"
      style={{ translate: `${shift}px` }}
      role="dialog"
      aria-label="Export"
      data-testid="export-panel"
      onKeyDown={walk}
    >
      <p class="muted">{why === null ? whatIsWritten(s) : "Nothing can be exported here."}</p>
      {why !== null && <p data-testid="export-why">{why}</p>}
      {why === null && (
        <div class="export-formats">
          {FORMATS.map((format) => (
            <button
              key={format.id}
              type="button"
              data-testid={`export-${format.id}`}
              disabled={busy}
              onClick={() => onWrite(format)}
            >
              <b>{format.name}</b>
              <span>{format.what}</span>
            </button>
          ))}
        </div>
      )}
      <Progress job={job} />
      <div class="row copies">
        <CopyCommand sideFile={step.data?.source.side_file} />
      </div>
    </div>
  );
}

/** Up and down walk from button to button. */
function walk(event: KeyboardEvent): void {
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (by === undefined) return;
  const all = [...(event.currentTarget as HTMLElement).querySelectorAll<HTMLElement>("button:enabled")];
  all[(all.indexOf(document.activeElement as HTMLElement) + by + all.length) % all.length]?.focus();
  event.preventDefault();
}

function whatIsWritten(s: Selection): string {
  const steps = s.window.steps.map((one) => one.step);
  const which = steps.length > 1 ? `steps ${steps[0]} to ${steps.at(-1)}` : s.steps.length === 1 && s.step === 0 ? "the recording" : `step ${s.step}`;
  const devices = s.devices.length > 1 ? ", every device" : "";
  return `Everything recorded on ${shortened(visible(s.worker), 40)} in ${which}${devices}, as:`;
}

/** Why nothing can be written; null where everything can. */
function reason(s: Selection, step: StepAnswer | undefined): string | null {
  if (!s.stats) return `MemoryMonitor recorded figures of this step, not its allocations. ${instead(s)}`;
  if (step === undefined || step.source.side_file_present) return null;
  if (runs.value?.logdir === "")
    return "TensorBoard was started with --logdir_spec. Start it with --logdir and a folder above the runs.";
  return `The recording's side file ${titleText(step.source.side_file)} is missing. Copy plugins/ along with the event files.`;
}

/** Where the figures can be had, or a step that can be written. */
function instead(s: Selection): string {
  if (s.steps.length > 0) return `Pick a step that was recorded in full, as ${s.steps[0]!.step}.`;
  return (
    "The same figures are in TensorBoard's Scalars, under memory/; 'tb-memplugin export' on the run's folder " +
    "writes them as CSV or JSON. " +
    "For everything else record a few steps with memory_trace_handler beside the monitor: the Overview shows how."
  );
}

function Progress({ job }: { job: Job | null }) {
  if (job?.is === "failed")
    return (
      <div class="export-failed" role="alert" data-testid="export-failed">
        <b>{titleText(job.failure.what)}</b>
        <span class="mono breaking">{titleText(job.failure.where)}</span>
        <span>{titleText(job.failure.fix)}</span>
      </div>
    );
  return (
    <div role="status" data-testid="export-status">
      {job?.is === "writing" && <p>Writing the {job.format.name} …</p>}
      {job?.is === "written" && (
        <>
          <p class="breaking" title={exactBytes(job.about.bytes)}>
            Downloading <span class="mono">{visible(job.about.name)}</span>, {withUnit(job.about.bytes)}
          </p>
          {job.about.notes.slice(0, 4).map((note) => (
            <p key={note} class="muted breaking">
              {titleText(note)}
            </p>
          ))}
        </>
      )}
    </div>
  );
}

function CopyCommand({ sideFile }: { sideFile: string | undefined }) {
  const shown = stretch.value;
  if (sideFile === undefined || !shown) return null;
  const { device, step } = shown.query;
  const logdir = runs.value?.logdir ?? "";
  const command = commandOf({ route: route.value, logdir, sideFile, device, step: shown.whole ? null : step });
  if (command === null) return null;
  return <CopyButton label="Copy command" testid="copy-command" title={visible(command)} text={() => command} />;
}
