"""Files to traces: snapshots, Kineto traces, timelines, and the detection of formats. Never imports torch."""
