"""Placement algorithms: arrays in, arrays out. Pure numpy; no engine, no message, no clock.

Admission rule: an algorithm that could be published with its complexity. The calls and their order are in
`planning`. docs/solvers.md says for every algorithm when it runs, its complexity, its bound and its published
source.

Range of the constants: numbers of rounds, trials and margins in mean rank loads are measured on 8, 32 and 64
ranks with 58 x 256 and 94 x 128 experts and 3 to 40 slots per rank (`docs/measurements.md`, *Placements*),
and compared with brute force on 3 ranks. Elsewhere a search may stop early, but its result is legal
and is still priced by the planner. Margins against noise are in standard deviations, from the counts of the
window.
"""
