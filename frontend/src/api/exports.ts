/** What `export_about` tells of a written file. */
export interface ExportAbout {
  name: string;
  bytes: number;
  /** What had to be made up or left out, in sentences. */
  notes: string[];
}
