import type { Query } from "../../api/request";
import { navigate, route } from "../../state/app";
import { Segmented } from "../segmented";
import { LineTable } from "./line_table";
import { RuleTable } from "./rule_table";
import { StackTable } from "./stack_table";

const TABLES = [
  ["stacks", "Stacks"],
  ["lines", "Source lines"],
  ["rules", "By rule"],
] as const;

/** The same bytes as rows: by stack, by source line, by rules that people write themselves. */
export function Tables({ query, search }: { query: Query; search: string }) {
  const table = TABLES.find(([key]) => key === route.value.table)?.[0] ?? "stacks";
  const picker = (
    <Segmented
      label="Rows"
      testid="table"
      options={TABLES}
      value={table}
      onPick={(to) => navigate({ table: to === "stacks" ? undefined : to, ranked: undefined })}
    />
  );
  return (
    <section class="card stack-tables">
      {table === "stacks" && <StackTable query={query} search={search} picker={picker} />}
      {table === "lines" && <LineTable query={query} search={search} picker={picker} />}
      {table === "rules" && <RuleTable query={query} picker={picker} />}
    </section>
  );
}
