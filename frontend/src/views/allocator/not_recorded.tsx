import { titleText } from "../../state/names";

/** What to record, where a window has no reserved memory or no segments. */
export function NotRecorded({ device, reserve }: { device: string; reserve: boolean }) {
  const cpu = !/^(cuda|xpu|hip)/.test(device);
  return (
    <section class="state" data-testid="no-segments">
      <h1>
        {reserve
          ? "This window shows how much was reserved, but not where: its segments were not recorded."
          : `This window has no record of reserved memory on ${titleText(device)}.`}
      </h1>
      {cpu && (
        <p>
          The CPU's allocator does not keep reserved memory: it asks the system for each block, so nothing can be
          fragmented. Pick a GPU to see its segments.
        </p>
      )}
      <p>
        To see segments, blocks and free gaps of a CUDA or XPU device, record the allocator's history too:
      </p>
      <pre class="code" data-testid="snapshot-code">
        {`handler = memory_trace_handler("runs/first", model=model, optimizer=optimizer, snapshot=True)`}
      </pre>
      <p>
        or import a snapshot that <span class="mono">torch.cuda.memory._dump_snapshot()</span> wrote, from any machine:
      </p>
      <pre class="code">tb-memplugin import snapshot.pickle --logdir LOGDIR</pre>
    </section>
  );
}
