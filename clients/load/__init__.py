"""The load generator: requests to any server of the protocol, sent as users would send them, and honest figures of
what came back.

    arrivals.py      when requests are due, without a clock
    recording.py     when they were due once: the format of files
    mixture.py       what they contain: bytes, ready to be sent
    regions.py       inputs and outputs in system shared memory
    histogram.py     many durations in little memory, percentiles, intervals
    tally.py         what happened in a slice of time, and sums of slices
    extent.py        how long to measure: until windows agree, for a time, or so many requests
    sending.py       one request: a call, or a stream's messages
    worker.py        a process that sends
    measuring.py     starts these processes, and adds up what they say
    control.py       the server's own figures, before and after; memory that it is to know
    outcome.py       figures by name
    assertions.py    bounds for figures
    printing.py      the outcome as text and JSON
    page.py          the outcome as a page with plots
    command.py       `paceline load`
"""
