import { useMemo } from "preact/hooks";
import { address } from "../../api/request";
import { useRemote } from "../../api/remote";
import type { FleetAnswer, FleetRun } from "../../api/types";
import { hostFilter } from "../../host/address";
import { navigate, route } from "../../state/app";
import { causeGroups, causeKey, fleetSentence, highestSentence, inFleetOrder, withText } from "../../state/fleet";
import { counted, grouped } from "../../state/numbers";
import { Name } from "../name";
import { Notice } from "../notices";
import { Toggle } from "../segmented";
import { Headline, Sentence } from "../sentence";
import { FailureState, Loading } from "../states";
import { Causes } from "./causes";
import { FleetTable } from "./fleet_table";

const TYPING = 250;

/** Which of all runs ran out of memory or grow, where, and which peaks highest. */
export function Fleet() {
  const { filter = "", pattern, cause, hosts } = route.value;
  const isPattern = pattern === "on" && filter !== "";
  const host = hosts === "off" ? "" : hostFilter();
  const every = useRemote<FleetAnswer>(address("fleet", { filter: host || undefined }), 0, ["filter"]);
  const matching = useRemote<FleetAnswer>(
    isPattern ? address("fleet", { filter: host || undefined, pattern: filter }) : null,
    TYPING,
    ["pattern", "filter"],
  );
  const all = every.data?.runs;
  const matched = isPattern ? matching.data?.runs : undefined;
  const rows = useMemo(() => matched ?? (isPattern ? all : all && withText(all, filter)) ?? [], [all, matched, isPattern, filter]);
  if (every.failure && host === "") return <FailureState failure={every.failure} />;
  if (!all && !every.failure) return <Loading what="all runs" />;
  const busy = every.stale || (isPattern && matching.loading);
  return (
    <div class={busy ? "stale" : undefined} aria-busy={busy}>
      <Summary rows={rows} />
      {host !== "" && <Hosts host={host} shown={all?.length} of={every.data?.count} failure={every.failure?.what} />}
      <Causes groups={causeGroups(rows)} of={rows.length} />
      <section class="card">
        <Tools filter={filter} isPattern={pattern === "on"} shown={rows.length} of={every.data?.count ?? 0} />
        {isPattern && matching.failure && (
          <p class="refused" role="alert" data-testid="pattern-refused">
            {matching.failure.what} {matching.failure.fix}
          </p>
        )}
        <Table rows={rows} cause={cause} />
      </section>
    </div>
  );
}

function Summary({ rows }: { rows: FleetRun[] }) {
  if (rows.length === 0) return <h1 class="headline" data-testid="headline">No run matches.</h1>;
  return (
    <>
      <Headline pieces={fleetSentence(rows)} />
      <p class="lead" data-testid="fleet-highest">
        <Sentence pieces={highestSentence(rows)} />
      </p>
    </>
  );
}

function Table({ rows, cause }: { rows: FleetRun[]; cause: string | undefined }) {
  const { ordered } = route.value;
  const listed = useMemo(
    () => inFleetOrder(cause === undefined ? rows : rows.filter((row) => causeKey(row) === cause), ordered),
    [rows, cause, ordered],
  );
  return <FleetTable rows={listed} />;
}

function Tools({ filter, isPattern, shown, of }: { filter: string; isPattern: boolean; shown: number; of: number }) {
  return (
    <div class="tools">
      <h2>Runs</h2>
      <input
        class="search"
        type="search"
        aria-label="Search in runs, ranks and source lines"
        placeholder={isPattern ? "Regular expression" : "Run, rank or source line"}
        data-testid="fleet-search"
        value={filter}
        maxLength={1000}
        onInput={(event) => navigate({ filter: event.currentTarget.value || undefined, cause: undefined })}
      />
      <Toggle
        text="Regular expression"
        on={isPattern}
        onFlip={() => navigate({ pattern: isPattern ? undefined : "on" })}
        testid="fleet-pattern"
      />
      <Toggle
        text="Findings of Advice"
        on={route.value.findings === "on"}
        onFlip={() => navigate({ findings: route.value.findings === "on" ? undefined : "on" })}
        testid="fleet-findings"
      />
      <span class="hint" role="status" data-testid="fleet-count">
        {shown === of ? counted(of, "run") : `${grouped(shown)} of ${counted(of, "run")}`}
      </span>
    </div>
  );
}

/** What TensorBoard's own filter of runs leaves, and the way past it. */
function Hosts({ host, shown, of, failure }: { host: string; shown: number | undefined; of: number | undefined; failure: string | undefined }) {
  return (
    <Notice level={failure ? "warning" : "info"} testid="host-filter">
      {failure ?? (
        <>
          TensorBoard filters its runs by <Name text={host} chip />: {grouped(shown ?? 0)} of {grouped(of ?? 0)} runs are shown.
        </>
      )}{" "}
      <button type="button" class="quiet" onClick={() => navigate({ hosts: "off" })}>
        Show all
      </button>
    </Notice>
  );
}
