package org.missioncontrol.workloads;

/** How long the phases of a task take, one after another. */
final class Stopwatch {
    private long last = System.nanoTime();

    /** Seconds since this was made, or asked the last time. */
    double seconds() {
        long now = System.nanoTime();
        double passed = (now - last) / 1e9;
        last = now;
        return passed;
    }
}
