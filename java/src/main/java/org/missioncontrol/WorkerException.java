package org.missioncontrol;

import java.io.IOException;

/** The worker refused or failed a request; the text has the reason. */
public class WorkerException extends IOException {
    private static final long serialVersionUID = 1;

    /** The status of its answer (docs/how-to/tasks.md); 410: the task is over, or runs again elsewhere. */
    public final int status;

    WorkerException(int status, String why) {
        super(why);
        this.status = status;
    }
}
