"""Runs in CPython 3.15: samples by line as its heat map counts them, `[[file, line, self, total]]`."""
import json
import sys

from profiling.sampling.binary_reader import BinaryReader
from profiling.sampling.heatmap_collector import HeatmapCollector

with BinaryReader(sys.argv[1]) as reader:
    heat = HeatmapCollector(1000)
    reader.replay_samples(heat, None)
shown = {stat.filename for stat in heat._calculate_file_stats()}
lines = [[file, line, heat.line_self_samples[file, line], total]
         for (file, line), total in heat.line_samples.items() if file in shown]
print(json.dumps(lines))
