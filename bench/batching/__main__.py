"""`python -m bench.batching`."""

from bench.batching.run import main

if __name__ == "__main__":
    main()
