import type { ComponentChildren } from "preact";
import type { Query } from "../../api/request";
import type { SourceLine } from "../../api/types";
import { navigate } from "../../state/app";
import { searchFor } from "../../state/frames";
import { Line, Ranked, RankedCells } from "./ranked";

interface Props {
  query: Query;
  search: string;
  picker: ComponentChildren;
}

/** Source lines: each stack counts for its innermost line of the user's code. */
export function LineTable({ query, search, picker }: Props) {
  return (
    <Ranked<SourceLine>
      what="line"
      query={query}
      search={search}
      picker={picker}
      name={["source line", "File, line and function"]}
      size={["median", "Size of the median allocation", (row) => row.median]}
      noMatch="No source line contains this text."
      rows={(_, scale) => (row) => (
        <tr key={row.line} data-testid="line-row" data-key={row.line} data-bytes={row.bytes}>
          <th scope="row">
            <button
              type="button"
              class="fold"
              title="Search for this file in the stacks"
              onClick={() => row.kind !== "none" && navigate({ search: searchFor(row.line) })}
            >
              <Line line={row.line} kind={row.kind} />
            </button>
          </th>
          <RankedCells row={row} size={row.median} scale={scale} />
        </tr>
      )}
    />
  );
}
