package org.missioncontrol;

import java.io.IOException;

/** The worker did not do what it was asked for; the text says why. */
public class WorkerException extends IOException {
    private static final long serialVersionUID = 1;

    /** The status of its answer (docs/how-to/tasks.md); 410: the task is over, or runs again elsewhere. */
    public final int status;

    WorkerException(int status, String why) {
        super(why);
        this.status = status;
    }
}
